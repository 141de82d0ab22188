"""The optimizers, one file each. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers.interface import Optimizer

_PLACES: Mapping[OptimizerName, str] = {
    "adamw_torch_fused": "adamw.FUSED",
    "adamw_torch": "adamw.FOREACH",
    "sgd": "sgd.PLAIN",
    "sgd_momentum": "sgd.MOMENTUM",
    "adafactor": "adafactor.ADAFACTOR",
    "adagrad": "adagrad.ADAGRAD",
    "rmsprop": "rmsprop.RMSPROP",
    "schedule_free_adamw": "schedulefree.ADAMW",
    "schedule_free_sgd": "schedulefree.SGD",
    "schedule_free_radam": "schedulefree.RADAM",
    "stable_adamw": "stable_adamw.STABLE_ADAMW",
    "adamw_bnb_8bit": "bitsandbytes.ADAMW_8BIT",
    "paged_adamw_8bit": "bitsandbytes.PAGED_ADAMW_8BIT",
    "paged_adamw_32bit": "bitsandbytes.PAGED_ADAMW",
    "lion_32bit": "bitsandbytes.LION",
    "lion_8bit": "bitsandbytes.LION_8BIT",
    "paged_lion_32bit": "bitsandbytes.PAGED_LION",
    "paged_lion_8bit": "bitsandbytes.PAGED_LION_8BIT",
    "ademamix": "bitsandbytes.ADEMAMIX",
    "ademamix_8bit": "bitsandbytes.ADEMAMIX_8BIT",
    "paged_ademamix_32bit": "bitsandbytes.PAGED_ADEMAMIX",
    "paged_ademamix_8bit": "bitsandbytes.PAGED_ADEMAMIX_8BIT",
    "rmsprop_bnb_32bit": "bitsandbytes.RMSPROP",
    "rmsprop_bnb_8bit": "bitsandbytes.RMSPROP_8BIT",
    "adamw_torch_8bit": "torchao.ADAMW_8BIT",
    "adamw_torch_4bit": "torchao.ADAMW_4BIT",
    "adamw_torch_fp8": "torchao.ADAMW_FP8",
    "adamw_cpu_offload": "cpu_offload.ADAMW_CPU_OFFLOAD",
    "muon": "muon.MUON",
    "galore_adamw": "low_rank.GALORE_ADAMW",
    "galore_adafactor": "low_rank.GALORE_ADAFACTOR",
    "apollo_adamw": "low_rank.APOLLO_ADAMW",
    "galore_adamw_layerwise": "low_rank.GALORE_ADAMW_LAYERWISE",
    "apollo_adamw_layerwise": "low_rank.APOLLO_ADAMW_LAYERWISE",
    "galore_adamw_8bit": "galore_8bit.GALORE_ADAMW_8BIT",
    "galore_adamw_8bit_layerwise": "galore_8bit.GALORE_ADAMW_8BIT_LAYERWISE",
    "lomo": "lomo.LOMO",
    "adalomo": "lomo.ADALOMO",
    "grokadamw": "grokadamw.GROKADAMW",
    "adam_mini": "adam_mini.ADAM_MINI",
}
"""The module here and the constant of each optimizer. A module is imported when a job needs it."""


def optimizer_named(name: OptimizerName) -> Optimizer:
    """The optimizer of this name. Raises ValueError for an unknown name.

    >>> optimizer_named("sgd_momentum").name
    'sgd_momentum'
    """
    if name not in _PLACES:
        raise ValueError(f"no optimizer {name!r} (there are {', '.join(_PLACES)})")
    module, constant = _PLACES[name].split(".")
    optimizer: Optimizer = getattr(import_module(f"{__name__}.{module}"), constant)
    return optimizer


def optimizer_of(plan: Plan) -> Optimizer:
    """The plan's optimizer with the plan's settings, as the plan's backend and framework make it."""
    optimizer = optimizer_named(plan.optim).with_settings(plan.optim_args, plan.optim_target_modules)
    if plan.backend == "deepspeed":
        optimizer = optimizer.made_by_deepspeed()
    return optimizer.made_by_trainer() if plan.facts.uses_trainer else optimizer
