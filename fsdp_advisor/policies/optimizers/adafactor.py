"""Adafactor: torch's implementation, which DeepSpeed makes too, and transformers', which the Trainer makes for every engine.

Source: torch/optim/_adafactor.py, `_multi_tensor_adafactor` (torch 2.13); transformers/optimization.py, `Adafactor.step`
(5.23); deepspeed 0.19.8, runtime/engine.py, `_configure_basic_optimizer`.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.policies.optimizers.interface import (
    STEP_COUNT_BYTES,
    Constructor,
    NamedOptimizer,
    Optimizer,
    Refusal,
    Shape,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

RMS_BYTES = 4
"""transformers' Adafactor keeps the root mean square of the parameter, an fp32 scalar."""
PASSES = 19
"""Tensors of a matrix's size that torch's update reads or writes: the norms of the parameter (1) and of the gradient's rows and columns
(2); the update's product (1), division (2), minimum (2), root (2), product with the gradient (3), norm (1), scale (2) and sum (3).
"""
TRANSFORMERS_PASSES = 21
"""The same of transformers' update, in fp32: the root mean square of the parameter (1); the gradient's square (2), its sum with epsilon
(2) and its means (2); the update's product (1), product with the gradient (3), root mean square (1), two scales (4), negation (2) and
sum (3). The kernels of a step on an H100 agree: 40 ms for 1.24 billion elements (`tests/records/h100_trainers.csv`).
"""


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
        """Adafactor does not factor a 1-D tensor: its second moment is whole."""
        return Storages.of(element_bytes * elements)

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return (element_bytes * elements, STEP_COUNT_BYTES)

    def textbook_bytes(self, element_bytes: int) -> int:
        """0, because the factored moments are negligible."""
        return 0

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The update: one tensor of the stepped tensor's size."""
        return Storages.of(prod(shape) * element_bytes)

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        """The squared gradient and the update. DeepSpeed makes it without `foreach`, with which the first is freed before the second."""
        return Storages.of(element_bytes * elements, 2)

    def made_by_trainer(self) -> Optimizer:
        return _adafactor(TransformersAdafactor)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        return PASSES * element_bytes * parameter.elements


class TransformersAdafactor(Adafactor):
    """The Adafactor of transformers, which has no foreach implementation. It converts what is in 16 bits to fp32."""

    steps_one_by_one: ClassVar[bool] = True

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        """The second moment, in fp32, and the root mean square."""
        return Storages.of(FP32_BYTES * elements) + Storages.of(RMS_BYTES)

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        return (FP32_BYTES * elements, RMS_BYTES)

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        """The squared gradient and the update in fp32; with bf16 masters also fp32 copies of the gradient and the master."""
        return Storages.of(FP32_BYTES * elements, 2 if element_bytes == FP32_BYTES else 4)

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The squared gradient and the update, in fp32."""
        return Storages.of(prod(shape) * FP32_BYTES, 2)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        casts = 3 * (element_bytes + FP32_BYTES) if element_bytes != FP32_BYTES else 0
        return (TRANSFORMERS_PASSES * FP32_BYTES + casts) * parameter.elements


_CONSTRUCTOR = Constructor(module="torch.optim", name="Adafactor", options={"foreach": True})


def _adafactor(cls: type[Adafactor], host_state_bytes: int = 0) -> Adafactor:
    return cls(
        name="adafactor",
        script=_CONSTRUCTOR,
        transformers=NamedOptimizer(name="adafactor"),
        deepspeed=NamedOptimizer(name="Adafactor"),
        deepspeed_offloaded=NamedOptimizer(name="Adafactor"),
        measured_zero1=Refusal("ZeroRedundancyOptimizer is not measured around adafactor"),
        host_kernel="many_passes",
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=False,
        host_state_bytes=host_state_bytes,
    )


ADAFACTOR = _adafactor(Adafactor, STEP_COUNT_BYTES)
