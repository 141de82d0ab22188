"""The interface of optimizers whose state and temporaries are tensors of the parameter's shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.interface import (
    STEP_COUNT_BYTES,
    Constructor,
    NamedOptimizer,
    Optimizer,
    Refusal,
    Shape,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass(frozen=True, kw_only=True)
class Elementwise(Optimizer):
    """An optimizer described by its numbers of tensors of the stepped tensor's size.

    `moments`: tensors of state. `temporaries`: tensors that a step holds at its peak. `passes`: how many tensors of the parameter's
    size the update reads or writes.
    """

    moments: int
    temporaries: int
    passes: int

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.flat_state_storages(prod(shape), element_bytes)

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes, self.moments) if elements else NO_STORAGES

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return (element_bytes * elements,) * self.moments

    def textbook_bytes(self, element_bytes: int) -> int:
        return self.moments * element_bytes

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.flat_step_temporaries(prod(shape), element_bytes)

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes, self.temporaries) if elements else NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        return self.passes * element_bytes * parameter.elements


def with_one_moment(
    name: OptimizerName, torch_name: str, deepspeed: NamedOptimizer | Refusal, *, temporaries: int, passes: int
) -> Elementwise:
    """An optimizer of `torch.optim` with one moment, which steps many tensors at a time (`foreach`), also on the host."""
    constructor = Constructor(module="torch.optim", name=torch_name, options={"foreach": True})
    return Elementwise(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name=name),
        deepspeed=deepspeed,
        deepspeed_offloaded=deepspeed,
        host_kernel="many_passes",
        deepspeed_host_kernel="many_passes",
        is_cpu_adam=False,
        host_state_bytes=STEP_COUNT_BYTES,
        moments=1,
        temporaries=temporaries,
        passes=passes,
    )
