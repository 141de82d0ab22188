"""The optimizer state of engines that step each parameter's local tensor: of a rank, and in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Optimizer, Stepped
from fsdp_advisor.program.storages import NO_STORAGES, Storages

SCALAR_BYTES = 4
"""A step count: one fp32 or int32 number."""


def kept_state(optimizer: Optimizer, tensors: Iterable[Stepped]) -> tuple[Storages, Storages]:
    """The state of the tensors that a rank steps: on the GPU, and in CUDA's managed memory."""
    kept = [(p, shape, n) for p, shape, n in tensors if optimizer.keeps_state_of(p)]
    return (
        sum((optimizer.state_storages(p, shape, n) for p, shape, n in kept), NO_STORAGES),
        sum((optimizer.paged_state_storages(p, shape) for p, shape, _ in kept), NO_STORAGES),
    )


class SavedState(NamedTuple):
    """Bytes of optimizer state in a checkpoint; all 0 if the plan saves only the weights.

    `total`: all tensors, also those on the host. `scalars`: step counts and a group's learning rate among them. `largest`: the largest
    tensor.
    """

    total: int = 0
    scalars: int = 0
    largest: int = 0


def saved_state(profile: Profile, plan: Plan, shape_of: Callable[[Parameter], Sequence[int]]) -> SavedState:
    """The optimizer state of tensors of the shapes that `shape_of` returns for each trainable parameter.

    The Trainer makes two groups of parameters, with weight decay and without. Source: transformers 5.23, trainer.py, `create_optimizer`.
    """
    if plan.save_only_model:
        return SavedState()
    optimizer = optimizer_of(plan)
    scalars, largest = optimizer.group_state_bytes * (2 if plan.facts.uses_trainer else 1), 0
    total = optimizer.shared_state.exact + scalars
    for p, count in profile.counted_parameters():
        if optimizer.keeps_state_of(p):
            state = optimizer.all_state_storages(p, shape_of(p), stored_bytes(plan, p))
            on_host = optimizer.host_state_bytes if state.exact else 0
            total += (state.exact + on_host) * count
            scalars += (sum(n for n in state.each() if n == SCALAR_BYTES) + on_host) * count
            largest = max(largest, *state.each(), 0)
    return SavedState(total, scalars, largest)
