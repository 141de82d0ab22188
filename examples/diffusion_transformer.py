"""Estimate the training of a diffusion transformer of diffusers: `pip install diffusers`, then `python examples/diffusion_transformer.py`.

The transformer of Stable Diffusion 3.5 medium (an MMDiT) trains on images of 1024 x 1024 pixels with flow matching, as diffusers'
examples/dreambooth/train_dreambooth_sd3.py does. The latents of the autoencoder and the embeddings of the text encoders are inputs, as
where they are computed before training: neither is in the memory that is estimated.
"""

from __future__ import annotations

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock
from torch.nn import functional as F

import fsdp_advisor

CONFIG = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "caption_projection_dim": 1536, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
"""Source: the transformer/config.json of stabilityai/stable-diffusion-3.5-medium."""
TEXT_TOKENS = 333
IMAGE_TOKENS = (CONFIG["sample_size"] // CONFIG["patch_size"]) ** 2
"""4,096 patches of latents. Speeds count these."""


def transformer() -> torch.nn.Module:
    return SD3Transformer2DModel.from_config(CONFIG)


def batch(micro_batch_size: int, _: int) -> dict[str, torch.Tensor]:
    """Noisy latents, conditions and the target of the flow. The size of the images decides about the length, not the second argument."""
    side, channels = CONFIG["sample_size"], CONFIG["in_channels"]
    latents = torch.zeros(micro_batch_size, channels, side, side)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": torch.zeros(micro_batch_size, TEXT_TOKENS, CONFIG["joint_attention_dim"]),
        "pooled_projections": torch.zeros(micro_batch_size, CONFIG["pooled_projection_dim"]),
        "timestep": torch.zeros(micro_batch_size),
        "target": torch.zeros_like(latents),
    }


def loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = dict(inputs)
    target = inputs.pop("target")
    return F.mse_loss(model(**inputs, return_dict=False)[0].float(), target.float())


if __name__ == "__main__":
    recorder = fsdp_advisor.record_module(
        transformer, batch, loss, wrap=[JointTransformerBlock], name="Stable Diffusion 3.5 medium"
    )
    job = {"gpu": "H100", "gpus": 8, "strategy": "zero3", "micro_batch_size": 4, "seq_len": IMAGE_TOKENS}
    print(fsdp_advisor.estimate(model=recorder, **job))
