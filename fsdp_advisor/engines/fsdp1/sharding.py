"""The names of FSDP1's sharding strategies and of its backward prefetching.

Source: accelerate 1.15, utils/constants.py, FSDP_SHARDING_STRATEGY; torch 2.13, torch.distributed.fsdp.api, ShardingStrategy, which has
the same names and numbers, but `_HYBRID_SHARD_ZERO2`.
"""

from __future__ import annotations

from fsdp_advisor.job.choices import Strategy
from fsdp_advisor.job.plan import Plan

_STRATEGIES: dict[str, tuple[Strategy, bool]] = {
    "FULL_SHARD": ("zero3", True),
    "SHARD_GRAD_OP": ("zero2", False),
    "NO_SHARD": ("ddp", False),
    "HYBRID_SHARD": ("hsdp", True),
    "HYBRID_SHARD_ZERO2": ("hsdp", False),
}
"""accelerate's name -> (strategy, whether parameters are resharded after forward), in the order of the numbers 1 to 5."""
_NAMES = {shards: name for name, shards in _STRATEGIES.items()}
NAMES = tuple(_STRATEGIES)
"""accelerate's names of the sharding strategies."""
PREFETCH_NAMES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}
"""Backward prefetch of a plan -> accelerate's name. transformers expects it in lower case. PyTorch has None instead of the last one."""


def sharding_name(plan: Plan) -> str:
    """accelerate's name of the plan's sharding."""
    return _NAMES[plan.strategy, plan.reshards]


def torch_sharding_name(plan: Plan) -> str:
    """PyTorch's name of the plan's sharding."""
    return sharding_name(plan).replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")


def sharding_options(name: str) -> dict[str, str] | None:
    """The options of a sharding strategy, given by accelerate's name, PyTorch's or the number; None if there is no such strategy.
    NO_SHARD, which keeps everything on each rank, has those of DDP.

    >>> sharding_options("_HYBRID_SHARD_ZERO2"), sharding_options("2")
    ({'strategy': 'hsdp', 'reshard_after_forward': 'false'}, {'strategy': 'zero2'})
    """
    number = NAMES[int(name) - 1] if name in ("1", "2", "3", "4", "5") else name
    found = _STRATEGIES.get(number.upper().removeprefix("_"))
    if found is None:
        return None
    strategy, reshards = found
    keeps = {"reshard_after_forward": "false"} if strategy == "hsdp" and not reshards else {}
    return {"strategy": strategy, **keeps}
