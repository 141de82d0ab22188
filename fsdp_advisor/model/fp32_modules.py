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
    return not types.isdisjoint(FP32_MODULES)
