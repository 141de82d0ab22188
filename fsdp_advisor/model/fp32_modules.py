"""Models with modules that transformers keeps in fp32 when it loads the others in 16 bits."""

from __future__ import annotations

from fsdp_advisor.model.profile import Profile

FP32_MODULES = frozenset({
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "blip_2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "dots3_note", "ernie4_5_moe", "ernie4_5_vl_moe", "esmfold2", "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm5_next", "glm_moe_dsa", "gpt_oss", "gradium_phonon_tts", "granite_speech5", "hy_v3", "hy_v4",
    "inkling", "inkling2", "instructblip", "instructblipvideo", "kolibri1", "kyutai_speech_to_text", "longcat_flash",
    "mimo_v2_flash", "mistral_large4", "mt5", "muse_spark", "nemotron3_5_transcribe", "nemotron_h",
    "openai_privacy_filter", "pocket_tts", "pop2piano", "rwkv", "slanext", "solar_open", "t5", "udop", "umt5", "voxtral",
})  # fmt: skip
"""The folders of transformers' models that have a class with such modules. Source: transformers 5.23, models/*/modeling_*.py,
`_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`.
"""


def keeps_modules_in_fp32(profile: Profile) -> bool:
    """Whether the model, or a part of it that has its own configuration, has modules that stay in fp32."""
    configs = [profile.config, *(value for value in profile.config.values() if isinstance(value, dict))]
    types = {str(config.get("model_type")).removesuffix("_text") for config in configs}
    return not types.isdisjoint(FP32_MODULES | FP32_ROUTERS_SINCE_5_24)


_ROUTERS = ("gate.weight",)
FP32_WEIGHTS: dict[str, tuple[str, ...]] = {
    "bailing_hybrid": ("A_log", "conv1d.weight", "dt_bias"),
    "beam": _ROUTERS,
    "deepseek_v4": ("input_layernorm.weight", "sinks"),
    "ernie4_5_moe": _ROUTERS,
    "ernie4_5_vl_moe": _ROUTERS,
    "flint": (*_ROUTERS, "sinks"),
    "glm5_next": ("A_log", "conv1d.weight", "dt_bias"),
    "hy_v4": ("sinks", "lm_head.weight"),
    "inkling": ("gate.global_scale",),
    "inkling2": _ROUTERS,
    "mistral_large4": _ROUTERS,
    "muse_spark": _ROUTERS,
}
"""Model type -> ends of the names of weights that transformers loads in fp32 also where the others are loaded in bf16. Only types with
trained weights of both dtypes in a layer or the root are listed. Source: transformers 5.23, `_keep_in_fp32_modules_strict` of the classes.
"""
FP32_ROUTERS_SINCE_5_24 = frozenset({
    "axk1", "axk2", "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hy_v3", "hy_v4_vl", "inkling2_loop", "kimi_k25", "kimi_linear", "mimo_v2_flash",
    "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open", "unlimited_ocr",
})  # fmt: skip
"""Model types whose routers transformers 5.24 and later loads so. Source: transformers 5.24, as above."""


def weights_in_fp32(profile: Profile) -> tuple[str, str] | None:
    """A trained weight that transformers loads in fp32 even if the others are loaded in bf16; and the first version that does so, such as "
    5.24", empty for 5.23 and earlier ones. None if there is no such weight.
    """
    model_type = str(profile.config.get("model_type")).removesuffix("_text")
    is_new = model_type in FP32_ROUTERS_SINCE_5_24
    ends = _ROUTERS if is_new else FP32_WEIGHTS.get(model_type, ())
    found = (
        p.name for p, _ in profile.counted_parameters() if p.trainable and p.dtype is None and p.name.endswith(ends)
    )
    name = next(found, None) if ends else None
    return None if name is None else (name, " 5.24" if is_new else "")
