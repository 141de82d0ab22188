"""The optimizers, one file each. CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from functools import lru_cache

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import (
    adafactor,
    adagrad,
    adam_mini,
    adamw,
    bitsandbytes,
    cpu_offload,
    galore_8bit,
    grokadamw,
    lomo,
    low_rank,
    muon,
    rmsprop,
    schedulefree,
    sgd,
    stable_adamw,
    torchao,
)
from fsdp_advisor.policies.optimizers.interface import Optimizer
from fsdp_advisor.policies.optimizers.low_rank import LowRank

_ALL: tuple[Optimizer, ...] = (
    adamw.FUSED,
    adamw.FOREACH,
    sgd.PLAIN,
    sgd.MOMENTUM,
    adafactor.ADAFACTOR,
    adagrad.ADAGRAD,
    rmsprop.RMSPROP,
    *schedulefree.ALL,
    stable_adamw.STABLE_ADAMW,
    *bitsandbytes.ALL,
    torchao.ADAMW_8BIT,
    torchao.ADAMW_4BIT,
    torchao.ADAMW_FP8,
    cpu_offload.ADAMW_CPU_OFFLOAD,
    muon.MUON,
    *low_rank.ALL,
    *galore_8bit.ALL,
    *lomo.ALL,
    grokadamw.GROKADAMW,
    adam_mini.ADAM_MINI,
)
_BY_NAME = {optimizer.name: optimizer for optimizer in _ALL}


def optimizer_named(name: OptimizerName) -> Optimizer:
    """The optimizer of this name. Raises ValueError for an unknown name.

    >>> optimizer_named("sgd_momentum").name
    'sgd_momentum'
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"no optimizer {name!r} (there are {', '.join(_BY_NAME)})") from None


def optimizer_of(plan: Plan) -> Optimizer:
    """The plan's optimizer with the plan's settings, as the plan's framework makes it."""
    return _with_settings(plan.optim, plan.optim_args, plan.optim_target_modules, plan.facts.uses_trainer)


@lru_cache(maxsize=64)
def _with_settings(
    name: OptimizerName, optim_args: str | None, target_modules: str | None, by_trainer: bool
) -> Optimizer:
    optimizer = optimizer_named(name)
    if isinstance(optimizer, LowRank):
        return optimizer.with_settings(optim_args, target_modules)
    return optimizer.made_by_trainer() if by_trainer else optimizer
