"""Multimodal models that train on text alone: their language model runs, and images or sound are optional."""

from __future__ import annotations

TRAINED_WHOLE = frozenset({
    "aria", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid",
    "ernie4_5_vl_moe", "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr",
    "granite_docling", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr",
    "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "minimax_m3_vl", "mistral3", "mistral_large4",
    "mllama", "muse_glimmer", "ovis2", "paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "shieldgemma2", "smolvlm", "video_llama_3",
    "video_llava", "vipllava",
})  # fmt: skip
"""Model types that AutoModelForImageTextToText builds from a configuration with a `text_config`, and whose forward needs no images.

Of others, such as BLIP-2, only the text part is recorded. Source: transformers 5.23, whose classes were run without images.
"""


def trained_on_text(model_type: str) -> str:
    """The note on a multimodal model that is estimated as it trains on text."""
    return (
        f"{model_type} is recorded as it trains on text: all its parameters are counted, but no activations of images or sound, and"
        " its towers get no gradients"
    )
