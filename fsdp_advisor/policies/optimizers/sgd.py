"""SGD of torch, without and with momentum. Source: torch/optim/sgd.py (torch 2.13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.interface import (
    NO_OPTIONS,
    Constructor,
    NamedOptimizer,
    Optimizer,
    Option,
    Shape,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """SGD, which updates in place. `momentum`: whether there is a momentum buffer, in the parameter's dtype."""

    momentum: bool

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        elements = prod(shape)
        return self.flat_state_storages(elements, element_bytes) if elements else NO_STORAGES

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes) if self.momentum else NO_STORAGES

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return (element_bytes * elements,) if self.momentum else ()

    def textbook_bytes(self, element_bytes: int) -> int:
        return element_bytes if self.momentum else 0

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes to read p and g and write p; with momentum also to read and write the buffer."""
        return (5 if self.momentum else 3) * element_bytes * parameter.elements


def _torch_sgd(name: OptimizerName, options: Mapping[str, Option]) -> Sgd:
    constructor = Constructor(module="torch.optim", name="SGD", options={**options, "foreach": True})
    by_deepspeed = NamedOptimizer(name="SGD", options=options)  # DeepSpeed makes the class of torch.optim
    return Sgd(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name="sgd", options=options),
        deepspeed=by_deepspeed,
        deepspeed_offloaded=by_deepspeed,
        measured=constructor,
        measured_zero1=constructor,
        host_kernel="many_passes",
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=False,
        momentum="momentum" in options,
    )


PLAIN = _torch_sgd("sgd", NO_OPTIONS)
MOMENTUM = _torch_sgd("sgd_momentum", {"momentum": 0.9})
