"""Adafactor: torch's implementation, and transformers', which the Trainer and DeepSpeed step.

Source: torch/optim/_adafactor.py, `_multi_tensor_adafactor` (torch 2.13); transformers/optimization.py, `Adafactor.step`
(5.23).
"""

from __future__ import annotations

from math import prod

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.interface import (
    Constructor,
    NamedOptimizer,
    Optimizer,
    Refusal,
    Shape,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

FP32_BYTES = 4
RMS_BYTES = 4
"""transformers' Adafactor keeps the root mean square of the parameter, an fp32 scalar."""
PASSES = 9
"""Tensors of the parameter's size that the update reads or writes: p, g, and the update several times."""


class Adafactor(Optimizer):
    """Adafactor: the second moment, factored into rows and columns; whole for a tensor of fewer than two dimensions."""

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        elements = prod(shape)
        if not elements:
            return NO_STORAGES
        if len(shape) < 2:
            return Storages.of(elements * element_bytes)
        rows, columns = elements // shape[-1], elements // shape[-2]
        return Storages.of(rows * element_bytes) + Storages.of(columns * element_bytes)

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        """transformers' Adafactor does not factor a 1-D tensor: its second moment is fp32 and whole."""
        return Storages.of(FP32_BYTES * elements) + Storages.of(RMS_BYTES)

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return (FP32_BYTES * elements, RMS_BYTES)

    def textbook_bytes(self, element_bytes: int) -> int:
        """0, because the factored moments are negligible."""
        return 0

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int, framework: str) -> Storages:
        """torch's Adafactor: the update. transformers' Adafactor: the squared gradient and the update, in fp32."""
        if self.steps_one_by_one(framework):
            return Storages.of(prod(shape) * FP32_BYTES, 2)
        return Storages.of(prod(shape) * element_bytes)

    def steps_one_by_one(self, framework: str) -> bool:
        """True under the Trainer: it uses transformers' Adafactor, which has no foreach implementation."""
        return framework in ("trainer", "trl", "axolotl")

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        """The squared gradient and the update in fp32; with bf16 masters also fp32 copies of the gradient and the master."""
        return Storages.of(FP32_BYTES * elements, 2 if element_bytes == FP32_BYTES else 4)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        return PASSES * element_bytes * parameter.elements


_CONSTRUCTOR = Constructor(module="torch.optim", name="Adafactor", options={"foreach": True})

ADAFACTOR = Adafactor(
    name="adafactor",
    script=_CONSTRUCTOR,
    transformers=NamedOptimizer(name="adafactor"),
    deepspeed=NamedOptimizer(name="Adafactor"),
    deepspeed_offloaded=NamedOptimizer(name="Adafactor"),
    measured=_CONSTRUCTOR,
    measured_zero1=Refusal("ZeroRedundancyOptimizer is not measured around adafactor"),
    host_kernel="many_passes",
    deepspeed_host_kernel="one_pass",
    is_cpu_adam=False,
)
