"""The implementation that computes the routed experts of a model."""

from __future__ import annotations

from fsdp_advisor.job.choices import ExpertsImplementation
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.profile import Parameter, Profile

LOOPS = frozenset({"dbrx", "jetmoe", "longcat_flash", "step3p7"})
"""Model types whose only implementation of experts is a loop over the experts that tokens select.

Source: transformers 5.23, their modeling files, which do not use integrations/moe.py.
"""

MOST_ON_CPU = 128
"""The most experts of a loop that is recorded for a CPU. With the 768 of LongCat-Flash a recording takes a minute."""

COPIED = frozenset({
    "afmoe", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe",
    "ernie4_5_vl_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm5_next_text", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k25", "kimi_linear", "laguna", "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "minimax_m3_vl", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text", "solar_open", "step3p7",
})  # fmt: skip
"""Model types of whose experts transformers makes new tensors when it loads them: it stacks those of one expert each, or transposes them.

Source: transformers 5.23, conversion_mapping.py, _build_checkpoint_conversion_mapping.
"""


def are_copied(profile: Profile, parameter: Parameter) -> bool:
    """Whether transformers makes this stacked tensor of experts while loading, because the checkpoint has them in another form."""
    return parameter.role == "expert" and len(parameter.shape) == 3 and profile.config.get("model_type") in COPIED


def code_of(model_type: object, wanted: ExpertsImplementation) -> ExpertsImplementation:
    """The implementation that a model of this type runs if `wanted` is requested. `grouped_mm`, the default, falls back to a loop."""
    return "eager" if wanted == "grouped_mm" and model_type in LOOPS else wanted


def experts_code(profile: Profile, wanted: ExpertsImplementation) -> ExpertsImplementation | None:
    """The implementation that runs a model's experts if `wanted` is requested; None if the model has no routed experts."""
    return None if profile.experts is None else code_of(profile.config.get("model_type"), wanted)


def has_long_expert_loop(profile: Profile, wanted: ExpertsImplementation) -> bool:
    """Whether a loop over more than `MOST_ON_CPU` experts runs if `wanted` is requested."""
    return experts_code(profile, wanted) == "eager" and (profile.experts or 0) > MOST_ON_CPU


def expert_notes(request: EstimateRequest, profile: Profile | None) -> list[str]:
    """Notes on the assumptions of the experts' implementation, and on its options that have no effect."""
    code = experts_code(profile, request.experts_implementation) if profile else None
    if code is None:
        given = [name for name in ("experts_implementation", "expert_imbalance") if name in request.changed]
        return [f"{name} is ignored: the model is not known to have routed experts" for name in given]
    if code != "eager":
        if request.expert_imbalance == 1.0:
            return []
        return [
            f"expert_imbalance changes no figure: the tensors of {code} have one row per chosen pair of token and expert,"
            " so their sizes do not depend on the choice"
        ]
    if request.expert_imbalance == 1.0:
        return [
            "tokens are assumed to choose all experts equally often; with expert_imbalance the busiest one has more"
        ]
    return []
