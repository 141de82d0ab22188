"""AdamW of bitsandbytes with 8-bit states. Source: bitsandbytes, optim/optimizer.py, `Optimizer2State`."""

from __future__ import annotations

from dataclasses import dataclass
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

QUANTIZED_BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale (`absmax`)."""
QUANTIZED_MIN_ELEMENTS = 4096
"""A tensor with fewer elements keeps fp32 moments."""
SCALE_BYTES = 4
FP32_BYTES = 4
QUANTIZATION_TABLE_BYTES = 1024
"""256 fp32 values. There is one table for signed and one for unsigned moments."""


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Optimizer):
    """Two moments of one byte per element, each with a scale per block. The update is in place."""

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        elements = prod(shape)
        if not elements:
            return NO_STORAGES
        if elements < QUANTIZED_MIN_ELEMENTS:
            return Storages.of(elements * FP32_BYTES) * 2
        return (Storages.of(elements) + Storages.of(_scale_bytes(elements))) * 2

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        if elements < QUANTIZED_MIN_ELEMENTS:
            return Storages.of(elements * FP32_BYTES, 2)
        return Storages.of(elements, 2) + Storages.of(_scale_bytes(elements), 2)

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        """DeepSpeedCPUAdam takes its place; its moments have the masters' dtype."""
        return (element_bytes * elements,) * 2

    def textbook_bytes(self, element_bytes: int) -> int:
        return 2

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int, framework: str) -> Storages:
        return NO_STORAGES

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Reads p, g and writes p; reads and writes two moments of a byte."""
        return (3 * element_bytes + 4) * parameter.elements


def _scale_bytes(elements: int) -> int:
    return SCALE_BYTES * -(-elements // QUANTIZED_BLOCK_ELEMENTS)


ADAMW_8BIT = AdamW8bit(
    name="adamw_bnb_8bit",
    script=Constructor(module="bitsandbytes.optim", name="AdamW8bit"),
    transformers=NamedOptimizer(name="adamw_bnb_8bit"),
    deepspeed=Refusal("DeepSpeed cannot make the 8-bit optimizer: pass bitsandbytes.optim.AdamW8bit to initialize()"),
    deepspeed_offloaded=NamedOptimizer(name="AdamW"),
    measured=Refusal("optimizer adamw_bnb_8bit cannot be measured here"),
    measured_zero1=Refusal("ZeroRedundancyOptimizer is not measured around adamw_bnb_8bit"),
    # its kernels treat DTensors as plain tensors: bitsandbytes issue 1633; axolotl refuses it too
    fsdp2=Refusal("bitsandbytes' 8-bit AdamW cannot step FSDP2's parameters (try another --optim, or --backend fsdp1)"),
    host_kernel="many_passes",
    deepspeed_host_kernel="one_pass",
    is_cpu_adam=True,
    shared_state=Storages.of(QUANTIZATION_TABLE_BYTES, 2),
    deepspeed_notes=("8-bit states under DeepSpeed are counted from bitsandbytes' layout and have not been run",),
)
