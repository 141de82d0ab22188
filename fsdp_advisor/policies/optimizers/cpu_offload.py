"""AdamW on the host under torchao's CPUOffloadOptimizer, for one GPU.

Backward copies each gradient to pinned memory as soon as it is complete. The step updates one tensor after the other with PyTorch's fused
AdamW on the CPU and copies it back. Small tensors stay on the GPU, and a second AdamW updates them there.

Source: torchao 0.18, optim/cpu_offload.py (`CPUOffloadOptimizer`), with its defaults: `offload_gradients` is off.
"""

from __future__ import annotations

from math import prod

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.adamw import FUSED
from fsdp_advisor.policies.optimizers.interface import (
    Constructor,
    NotForDeepSpeed,
    Refusal,
    Shape,
    without_deepspeed,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MINIMAL_ELEMENTS = 4096
"""A tensor with fewer elements stays on the GPU (`minimal_size`)."""


class CpuOffload(NotForDeepSpeed):
    """Two moments in the parameter's dtype and a step count. They are on the host, except those of small tensors."""

    def on_host(self, elements: int) -> bool:
        return elements >= MINIMAL_ELEMENTS

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES if self.on_host(prod(shape)) else FUSED.state_storages(parameter, shape, element_bytes)

    def all_state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return FUSED.state_storages(parameter, shape, element_bytes)

    def textbook_bytes(self, element_bytes: int) -> int:
        """0, because the state is on the host."""
        return 0

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of the copies, which read the gradient and write the parameter; for a small tensor, bytes of AdamW's update on the GPU."""
        if not self.on_host(parameter.elements):
            return FUSED.step_bytes(parameter, element_bytes)
        return 3 * element_bytes * parameter.elements


_CONSTRUCTOR = Constructor(module="torchao.optim", name="CPUOffloadOptimizer")

ADAMW_CPU_OFFLOAD = CpuOffload(
    name="adamw_cpu_offload",
    script=_CONSTRUCTOR,
    transformers=Refusal(
        "transformers 5.23 has no name for CPUOffloadOptimizer: pass torchao.optim.CPUOffloadOptimizer to the Trainer"
    ),
    **without_deepspeed("adamw_cpu_offload", host_kernel="one_pass"),
    measured_zero1=Refusal("CPUOffloadOptimizer is for one GPU"),
    measured_on_cpu=Refusal("CPUOffloadOptimizer needs a GPU"),
    notes=("CPUOffloadOptimizer copies each gradient to the host in backward, before it can be clipped",),
)
