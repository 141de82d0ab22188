"""The modules that PEFT adapts if the settings of LoRA name none, by type of model."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model.multimodal import is_tower
from fsdp_advisor.model.profile import Profile

WITH_DEFAULTS = frozenset({
    "RefinedWeb", "RefinedWebModel", "bart", "bert", "blip-2", "bloom", "btlm", "chatglm", "codegen", "deberta", "deberta-v2", "electra",
    "falcon", "gemma", "gemma2", "gemma3_text", "gemma4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "layoutlm", "llama",
    "llama4", "mistral", "mixtral", "mpt", "mt5", "nemotron_h", "opt", "phi", "qwen2", "qwen3", "roberta", "rwkv", "rwkv7", "stablelm",
    "t5", "xlm-roberta",
})  # fmt: skip
"""Model types for which LoRA has default modules. Source: peft 0.21, utils/constants.py,
TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
"""
_OF_VERSION = "0.21."


class NoDefaultTargets(UsageError):
    """LoRA's settings name no modules, and PEFT has no default for the model."""


def check_targets(adaptation: Adaptation, profile: Profile, peft_version: str | None) -> None:
    """Raises NoDefaultTargets if LoRA's settings name no modules and PEFT has no default for the model.

    `peft_version`: the installed one, None if PEFT is not installed. Another version than that of the table decides itself.
    """
    if (
        adaptation.method != "LORA"
        or adaptation.names_modules
        or not (peft_version or _OF_VERSION).startswith(_OF_VERSION)
    ):
        return
    model_type = profile.config.get("model_type")
    if model_type in WITH_DEFAULTS:
        return
    projections = projections_of_text(profile)
    some = f", or some of {', '.join(projections)}" if projections else ""
    raise NoDefaultTargets(
        "--lora-target-modules (in a file: target_modules) has to name the modules that get adapters: PEFT has no default"
        f" for {profile.name}, of type {model_type}",
        hint=f"--lora-target-modules all-linear (all linear layers but the head){some}",
    )


def projections_of_text(profile: Profile) -> list[str]:
    """The names of linear projections in a model's layers, without those of a vision or audio tower. Routers, which often are no linear
    layers, are not among them.
    """
    modules = (
        parameter.name.split(".")[-2]
        for stack in profile.stacks
        if not is_tower(stack.path)
        for unit in stack.units
        for parameter in unit.parameters
        if parameter.role == "other" and len(parameter.shape) == 2 and parameter.name.endswith(".weight")
    )
    return list(dict.fromkeys(name for name in modules if "proj" in name))
