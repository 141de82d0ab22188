"""AdamW of torchao with 8-bit, 4-bit and fp8 states. torch.compile compiles its update for each parameter.

Source: torchao 0.18, optim/adam.py (`_AdamBase`), optim/subclass_8bit.py, subclass_4bit.py, subclass_fp8.py; the
temporaries are those of the code that Inductor (torch 2.13) generates for `single_param_adam`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fsdp_advisor.job.choices import OptimizerName
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

BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale.

It is the Trainer's value for 8 and 4 bits, and torchao's for fp8; torchao's own for 4 bits is 128.
"""
QUANTIZED_MIN_ELEMENTS = 4096
"""A tensor with fewer elements, or one whose elements are not a multiple of the block, keeps moments of its own dtype."""
INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TorchaoAdamW(Optimizer):
    """Two moments, each with codes of `bits` bits, a scale per block and, unless they are `fp8`, a table of the codes' values."""

    steps_one_by_one: ClassVar[bool] = True

    bits: int
    fp8: bool = False

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.flat_state_storages(prod(shape), element_bytes)

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        if not elements:
            return NO_STORAGES
        if not _quantizes(elements):
            return Storages.of(elements * element_bytes) * 2
        table = NO_STORAGES if self.fp8 else Storages.of(FP32_BYTES * 2**self.bits)
        return (Storages.of(elements * self.bits // 8) + _scales(elements) + table) * 2

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        """DeepSpeed replaces it by DeepSpeedCPUAdam, whose moments have the masters' dtype."""
        return (element_bytes * elements,) * 2

    def textbook_bytes(self, element_bytes: int) -> int:
        return 2 * self.bits // 8

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """Scales and new moments in fp32; for 4-bit states also the new codes in int64.

        For the 8-bit states of a 1-D tensor one kernel computes scales and codes. For fp8 states the new moments are never stored.
        """
        elements = prod(shape)
        if self.fp8:
            return _scales(elements) * 2 if _quantizes(elements) else NO_STORAGES
        if not _quantizes(elements) or (self.bits == 8 and len(shape) == 1):
            return NO_STORAGES
        codes = NO_STORAGES if self.bits == 8 else Storages.of(INT64_BYTES * elements, 2)
        return _scales(elements) * 2 + Storages.of(FP32_BYTES * elements, 2) + codes

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return self.step_temporaries(Parameter(name="flat", shape=(elements,)), (elements,), element_bytes)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes to read p and g, write p, and read and write the moments. With temporaries, g and the moments are read twice."""
        moments = 2 * self.bits / 8
        per_element = 3 * element_bytes + 2 * moments
        temporaries = self.step_temporaries(parameter, parameter.shape, element_bytes).exact
        if temporaries:
            per_element += element_bytes + moments
        return int(per_element * parameter.elements) + 2 * temporaries


def _quantizes(elements: int) -> bool:
    return elements >= QUANTIZED_MIN_ELEMENTS and elements % BLOCK_ELEMENTS == 0


def _scales(elements: int) -> Storages:
    return Storages.of(FP32_BYTES * (elements // BLOCK_ELEMENTS))


_NOT_NAMED = "transformers 5.23 has no name for torchao's fp8 AdamW: pass torchao.optim.AdamWFp8 to the Trainer"


def _torchao(name: OptimizerName, cls: str, bits: int, *, fp8: bool = False) -> TorchaoAdamW:
    constructor = Constructor(module="torchao.optim", name=cls, options={"block_size": BLOCK_ELEMENTS})
    return TorchaoAdamW(
        name=name,
        script=constructor,
        transformers=Refusal(_NOT_NAMED) if fp8 else NamedOptimizer(name=name),
        deepspeed=Refusal(f"DeepSpeed cannot make this optimizer: pass torchao.optim.{cls} to initialize()"),
        deepspeed_offloaded=NamedOptimizer(name="AdamW"),
        measured_zero1=Refusal(f"ZeroRedundancyOptimizer is not measured around {name}"),
        measured_on_cpu=Refusal(f"torchao's {cls} is compiled, and allocates less on the CPU than on a GPU"),
        host_kernel="many_passes",
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=True,
        host_state_bytes=STEP_COUNT_BYTES,
        group_state_bytes=FP32_BYTES,  # the learning rate
        deepspeed_notes=(
            "the states of torchao under DeepSpeed are counted from its source code and have not been run",
        ),
        bits=bits,
        fp8=fp8,
    )


ADAMW_8BIT = _torchao("adamw_torch_8bit", "AdamW8bit", 8)
ADAMW_4BIT = _torchao("adamw_torch_4bit", "AdamW4bit", 4)
ADAMW_FP8 = _torchao("adamw_torch_fp8", "AdamWFp8", 8, fp8=True)
