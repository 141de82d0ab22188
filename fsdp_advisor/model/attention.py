"""The attention of a model's layers: the width of a head, sliding windows, and whether tokens see those after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Attention
from fsdp_advisor.model.profile import Profile

WIDEST_FLASH_HEAD = 256
"""The widest head of FlashAttention 2, of PyTorch's copy of it and of cuDNN's kernels. Wider heads use sdpa's memory-efficient kernel."""

_WINDOWS = {
    "f": "cohere_compass_text laguna mellum step3p5",
    "sf": "gemma2 gpt_oss t5_gemma_module vaultgemma",
    "ssf": "ultrabert",
    "sssf": "afmoe cohere2 cohere2_moe exaone4 exaone_moe muse_glimmer_text muse_spark_text olmo3",
    "ssssf": "gemma3n_text kolibri1",
    "sssssf": (
        "beam diffusion_gemma_text embedding_gemma2_text gemma3_text gemma4_text gemma4_unified_text t5gemma2_decoder t5gemma2_text"
    ),
    "fsss": "cwm granite_swa granitemoe_swa",
    "fffs": "smollm3",
}
_DEFAULT_WINDOWS = {model_type: pattern for pattern, types in _WINDOWS.items() for model_type in types.split()}
"""Type of the model -> the layers whose `layer_types` a configuration leaves open, in turn: s has a sliding window, f has none. In other
types all have one. Source: the configuration classes of transformers 5.23.
"""
_WINDOWS_FROM = {
    "deepseek_ocr2_encoder": 28, "dots1": 62, "qwen2": 28, "qwen2_5_omni_talker": 28, "qwen2_5_omni_text": 28, "qwen2_5_vl_text": 80,
    "qwen2_vl_text": 80, "qwen3": 28, "qwen3_omni_moe_talker_code_predictor": 28,
}  # fmt: skip
"""Types whose layers have a window from the number `max_window_layers` on, and its default."""
_LATENT_HEADS: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(
        (
            "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "kimi_linear", "longcat_flash",
            "sarvam_mla", "youtu",
        ),
        (128, 64, 128),
    ),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text"), (192, 64, 256)),
    **dict.fromkeys(("mistral4", "mistral_large4_text"), (64, 64, 128)),
    "axk2": (64, 32, 64),
    "glm5_next_text": (256, 0, 256),
    "minicpm3": (64, 32, None),
}  # fmt: skip
"""Type of a model with latent attention -> `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim` that a configuration leaves open
(None: the model's width divided by its heads). Source: the configuration classes of transformers 5.24.
"""

_BIDIRECTIONAL = {
    "albert", "bart", "bert", "big_bird", "bigbird_pegasus", "bros", "camembert", "canine", "convbert", "data2vec-text",
    "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte",
    "ibert", "jina_embeddings_v3", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mbart",
    "megatron-bert", "mobilebert", "modernbert", "modernvbert", "mpnet", "mra", "mt5", "mvp", "nomic_bert", "nystromformer",
    "openai_privacy_filter", "perceiver", "plbart", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "squeezebert", "t5", "t5gemma", "t5gemma2", "tapas", "ultrabert", "ultravbert", "umt5", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod", "yoso",
}  # fmt: skip
"""Types of encoders, with or without a decoder, that transformers 5.23 gives a head for classification."""


def has_window(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a model with a sliding window has one, by the configuration of its language model.

    >>> [has_window({"model_type": "olmo3"}, layer) for layer in range(4)]
    [True, True, True, False]
    """
    kinds, model_type = config.get("layer_types"), config.get("model_type", "")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sliding_attention")
    if model_type in _WINDOWS_FROM:
        first = config.get("max_window_layers")
        return layer >= (first if isinstance(first, int) else _WINDOWS_FROM[model_type])
    every = config.get("sliding_window_pattern")
    pattern = "s" * (every - 1) + "f" if isinstance(every, int) and every > 0 else _DEFAULT_WINDOWS.get(model_type, "s")
    return pattern[layer % len(pattern)] == "s"


def is_causal(profile: Profile) -> bool:
    """Whether tokens of text attend to those before them only, whatever head the model has."""
    if profile.text_config.get("use_bidirectional_attention") is True:
        return False
    if profile.task in ("sequence-classification", "token-classification"):
        return profile.config.get("model_type") not in _BIDIRECTIONAL
    return profile.task in ("causal-lm", "image-text-to-text")


def head_dim(profile: Profile) -> int:
    """The dimension of one attention head from the configuration; 128 if it is not given there.

    With latent attention it is that of queries and keys, which have a part with positions; `head_dim` may be the latent vector's width.
    """
    config = profile.text_config
    if (latent := _latent_heads(config)) is not None:
        return latent[0]
    for name in ("head_dim", "d_kv"):
        if isinstance(own := config.get(name), int):
            return own
    return _share_of_a_head(config)


def mixes_head_widths(profile: Profile) -> bool:
    """Whether values have another width than queries and keys, as in DeepSeek's latent attention.

    sdpa's flash kernel then does not apply. Source: sdp_utils.cpp, check_head_dim_size_flash.
    """
    latent = _latent_heads(profile.text_config)
    return latent is not None and latent[0] != latent[1]


def _latent_heads(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The widths of a head of queries and keys, and of values, in latent attention; None for other attention."""
    defaults = _LATENT_HEADS.get(config.get("model_type", ""), (None, None, None))
    stated = (config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    without_positions, with_positions, values = (
        width if isinstance(width, int) else default for width, default in zip(stated, defaults, strict=True)
    )
    if without_positions is None or with_positions is None:
        return None
    return without_positions + with_positions, values or _share_of_a_head(config)


def _share_of_a_head(config: Mapping[str, Any]) -> int:
    """The model's width divided by its heads; 128 if the configuration lacks one of them."""
    width = config.get("hidden_size", config.get("n_embd", config.get("d_model")))
    heads = config.get("num_attention_heads", config.get("n_head", config.get("num_heads", config.get("n_heads"))))
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 128


def wide_head_dim(profile: Profile) -> int:
    """The dimension of a head in layers without a sliding window, which may be wider."""
    wide = profile.text_config.get("global_head_dim")
    return wide if isinstance(wide, int) else head_dim(profile)


def heads_refusal(profile: Profile, attention: Attention) -> UsageError | None:
    """Why the model's heads do not run with an implementation of attention; None if they do."""
    widest = max(head_dim(profile), wide_head_dim(profile))
    if attention != "flash_attention_2" or widest <= WIDEST_FLASH_HEAD:
        return None
    return UsageError(
        f"heads of the model have {widest} dimensions, and FlashAttention 2 runs those of at most {WIDEST_FLASH_HEAD}",
        hint="--attention sdpa",
    )
