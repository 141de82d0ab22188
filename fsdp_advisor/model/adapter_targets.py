"""The modules that PEFT adapts: whether the settings name them, and whether the model has those that are named."""

from __future__ import annotations

import difflib

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model.freezing import parameter_names
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


def absent_targets(adaptation: Adaptation, adapted: Profile) -> tuple[str, ...]:
    """Notes on names of modules in an adapter's settings that the adapted model lacks. If PEFT finds some of the names, it ignores the
    others without an error, because one list may serve several models. Patterns are not checked.

    Source: peft 0.21, tuners/tuners_utils.py, `check_target_module_exists` and `inject_adapter`. If PEFT adapts experts that are 3-D
    parameters, there are no notes: names may be those that transformers 4 gave to linear layers, which PEFT converts
    (utils/transformers_weight_conversion.py).
    """
    named = {
        key: names
        for key in ("target_modules", "modules_to_save")
        if isinstance(names := adaptation.peft.get(key), list)
    }
    if not named or any(".experts.base_layer." in name for name in adapted.parameter_names()):
        return ()
    modules = {f".{name.rpartition('.')[0]}." for name in parameter_names(adapted)}
    last = {part for module in modules for part in module.split(".")}
    notes = []
    for key, names in named.items():
        for name in names:
            if not any(f".{name}." in module for module in modules):
                near = difflib.get_close_matches(name, last, n=1, cutoff=0.75)
                meant = f" (did you mean {near[0]}?)" if near else ""
                notes.append(f"{adapted.name} has no module {name}, which {key} names{meant}: PEFT leaves it out")
    return tuple(notes)
