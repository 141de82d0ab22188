"""Small vision-language models of each type whose images are modelled, and the images of their samples."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.job.images import Images

TEXT = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 152_064, "head_dim": 64,
}  # fmt: skip
TOWER = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
QWEN_TOWER = {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 256}
WIDE = {k: v for k, v in TEXT.items() if k != "head_dim"} | {"hidden_size": 512}
"""Qwen2-VL's positions need heads of 128."""
TILE = {"image_size": 112, "patch_size": 14}
PINPOINTS = [[112, 224], [224, 112], [224, 224]]
CLIP = {**TOWER, **TILE, "model_type": "clip_vision_model", "projection_dim": 64}
SIGLIP = {**TOWER, **TILE, "model_type": "siglip_vision_model", "vision_use_head": False}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip

MODELS: dict[str, tuple[dict[str, Any], Images]] = {
    "qwen2_vl": (
        {"vision_config": {"depth": 3, "embed_dim": 64, "num_heads": 4, "hidden_size": 512}, "text_config": WIDE},
        Images(1, 224, 308, 0),
    ),
    "qwen2_5_vl": (
        {"vision_config": QWEN_TOWER | {"out_hidden_size": 512, "depth": 12, "fullatt_block_indexes": [2, 5, 8, 11]}, "text_config": WIDE},
        Images(2, 224, 308, 0),
    ),
    "qwen3_vl": (
        {"vision_config": QWEN_TOWER | {"depth": 11, "deepstack_visual_indexes": [2, 7]}, "text_config": TEXT},
        Images(1, 256, 320, 0),
    ),
    "qwen3_5": (
        {"vision_config": QWEN_TOWER, "text_config": {**TEXT, **LINEAR, "num_hidden_layers": 4, "vocab_size": 248_320}},
        Images(1, 256, 320, 0),
    ),
    "glm4v": ({"vision_config": QWEN_TOWER, "text_config": TEXT}, Images(1, 224, 308, 0)),
    "glm46v": (
        {
            "vision_config": QWEN_TOWER | {"model_type": "glm4v_vision"},
            "text_config": TEXT | {"model_type": "glm4v_text"},
        },
        Images(1, 224, 308, 0),
    ),
    "kimi_k25": (
        {
            "vision_config": TOWER, "projection_hidden_size": 64,
            "text_config": {**TEXT, "n_routed_experts": 8, "moe_intermediate_size": 64, "num_key_value_heads": 4, "vocab_size": 163_840},
        },
        Images(1, 224, 308, 0),
    ),
    "gemma3": (
        {
            "vision_config": {**SIGLIP, "image_size": 224}, "mm_tokens_per_image": 64,
            "text_config": {**TEXT, "vocab_size": 262_208, "num_hidden_layers": 7},
        },
        Images(2, 0, 0, 0),
    ),
    "gemma4": (
        {
            "vision_config": {**TOWER, "num_key_value_heads": 4, "head_dim": 16},
            "text_config": {**TEXT, "vocab_size": 262_144, "num_hidden_layers": 6, "global_head_dim": 64, "hidden_size_per_layer_input": 0},
        },
        Images(1, 256, 320, 0),
    ),
    "paligemma": (
        {
            "vision_config": SIGLIP | {"projection_dim": 256}, "projection_dim": 256,
            "text_config": {**TEXT, "model_type": "gemma", "vocab_size": 257_216},
        },
        Images(2, 0, 0, 0),
    ),
    "llava": ({"vision_config": {**CLIP, "num_hidden_layers": 9}, "text_config": {**TEXT, "model_type": "llama"}}, Images(2, 0, 0, 0)),
    "llava_next": (
        {"vision_config": CLIP, "text_config": {**TEXT, "model_type": "llama"}, "image_grid_pinpoints": PINPOINTS},
        Images(1, 150, 200, 0),
    ),
    "llava_onevision": (
        {"vision_config": SIGLIP, "text_config": {**TEXT, "model_type": "qwen2"}, "image_grid_pinpoints": PINPOINTS},
        Images(1, 150, 200, 0),
    ),
    "internvl": (
        {
            "vision_config": {**TOWER, "image_size": [112, 112]}, "image_seq_length": 16,
            "text_config": {**TEXT, "model_type": "qwen2"},
        },
        Images(1, 150, 200, 0),
    ),
    "idefics3": (
        {
            "vision_config": {**TOWER, "image_size": 128, "patch_size": 16}, "scale_factor": 4,
            "text_config": {**TEXT, "model_type": "llama"},
        },
        Images(1, 150, 200, 0),
    ),
    "smolvlm": (
        {
            "vision_config": {**TOWER, "image_size": 128, "patch_size": 16}, "scale_factor": 4,
            "text_config": {**TEXT, "model_type": "llama"},
        },
        Images(1, 150, 200, 0),
    ),
    "llama4": (
        {
            "vision_config": {
                **TOWER, "intermediate_size": 256, "image_size": 112, "projector_input_dim": 64, "projector_output_dim": 64,
                "vision_output_dim": 64,
            },
            "text_config": {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 512, "num_hidden_layers": 4, "vocab_size": 202_048},
        },
        Images(1, 150, 200, 0),
    ),
    "mistral3": (
        {
            "vision_config": {
                **TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 448, "patch_size": 14, "num_hidden_layers": 9,
            },
            "text_config": {**TEXT, "model_type": "mistral"},
        },
        Images(2, 150, 200, 0),
    ),
}  # fmt: skip
"""The configuration and the images of each sample, by model type."""


def config_of(model_type: str) -> dict[str, Any]:
    """The configuration, as in config.json."""
    return {"model_type": model_type, **MODELS[model_type][0]}


def options_of(model_type: str) -> dict[str, Any]:
    """The options of an estimate for these images."""
    images = MODELS[model_type][1]
    size = {"image_size": f"{images.width}x{images.height}"} if images.height else {}
    return {"images_per_sample": images.per_sample, **size}
