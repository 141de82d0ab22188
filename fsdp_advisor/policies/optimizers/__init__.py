"""The optimizers, one file each. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers.interface import Optimizer

_NAMES: Mapping[str, tuple[OptimizerName, ...]] = {
    "adamw": ("adamw_torch_fused", "adamw_torch"),
    "sgd": ("sgd", "sgd_momentum"),
    "adafactor": ("adafactor",),
    "adagrad": ("adagrad",),
    "rmsprop": ("rmsprop",),
    "schedulefree": ("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"),
    "stable_adamw": ("stable_adamw",),
    "bitsandbytes": (
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "lion_32bit",
        "lion_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "ademamix",
        "ademamix_8bit",
        "paged_ademamix_32bit",
        "paged_ademamix_8bit",
        "rmsprop_bnb_32bit",
        "rmsprop_bnb_8bit",
    ),
    "torchao": ("adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8"),
    "cpu_offload": ("adamw_cpu_offload",),
    "muon": ("muon",),
    "low_rank": (
        "galore_adamw",
        "galore_adafactor",
        "apollo_adamw",
        "galore_adamw_layerwise",
        "apollo_adamw_layerwise",
    ),
    "galore_8bit": ("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
    "lomo": ("lomo", "adalomo"),
    "grokadamw": ("grokadamw",),
    "adam_mini": ("adam_mini",),
}
"""The names of the optimizers in `ALL` of each module here. A module is imported when a job needs it."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def optimizer_named(name: OptimizerName) -> Optimizer:
    """The optimizer of this name. Raises ValueError for an unknown name.

    >>> optimizer_named("sgd_momentum").name
    'sgd_momentum'
    """
    if name not in _MODULES:
        raise ValueError(f"no optimizer {name!r} (there are {', '.join(_MODULES)})")
    optimizers: tuple[Optimizer, ...] = import_module(f"{__name__}.{_MODULES[name]}").ALL
    return next(optimizer for optimizer in optimizers if optimizer.name == name)


def optimizer_of(plan: Plan) -> Optimizer:
    """The plan's optimizer with the plan's settings, as the plan's framework makes it."""
    return _with_settings(plan.optim, plan.optim_args, plan.optim_target_modules, plan.facts.uses_trainer)


@lru_cache(maxsize=64)
def _with_settings(
    name: OptimizerName, optim_args: str | None, target_modules: str | None, by_trainer: bool
) -> Optimizer:
    optimizer = optimizer_named(name).with_settings(optim_args, target_modules)
    return optimizer.made_by_trainer() if by_trainer else optimizer
