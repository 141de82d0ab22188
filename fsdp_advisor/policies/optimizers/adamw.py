"""AdamW of torch, fused and foreach.

Source: torch/optim/adam.py, `_init_group`, `_multi_tensor_adam`, `_fused_adam` (torch 2.13); under DeepSpeed's offload
deepspeed/ops/adam/cpu_adam.py (0.19.8).
"""

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
    Shape,
)
from fsdp_advisor.program.instructions import HostKernel
from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW: two moments in the parameter's dtype, and a step count.

    `step_count`: the step count on the GPU. `roots`: whether all square roots of second moments exist at the same time.
    `passes`: how many tensors of the parameter's size the update reads or writes.
    """

    step_count: Storages
    roots: bool
    passes: int

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        elements = prod(shape)
        if not elements:
            return NO_STORAGES
        return self.step_count + Storages.of(elements * element_bytes) * 2

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes, 2) + self.step_count

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        """The moments of DeepSpeedCPUAdam have the masters' dtype."""
        return (element_bytes * elements,) * 2

    def textbook_bytes(self, element_bytes: int) -> int:
        return 2 * element_bytes

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.flat_step_temporaries(prod(shape), element_bytes)

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes) if self.roots else NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        return self.passes * element_bytes * parameter.elements


def _torch_adamw(
    name: OptimizerName,
    implementation: str,
    *,
    step_count: Storages,
    host_state_bytes: int,
    roots: bool,
    passes: int,
    host_kernel: HostKernel,
) -> AdamW:
    constructor = Constructor(module="torch.optim", name="AdamW", options={implementation: True})
    return AdamW(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name=name),
        # with `torch_adam` DeepSpeed makes torch's (runtime/engine.py, _configure_basic_optimizer)
        deepspeed=NamedOptimizer(name="AdamW", options={"torch_adam": True, implementation: True}),
        deepspeed_offloaded=NamedOptimizer(name="AdamW"),
        measured=constructor,
        measured_zero1=constructor,
        host_kernel=host_kernel,
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=True,
        step_count=step_count,
        host_state_bytes=host_state_bytes,
        roots=roots,
        passes=passes,
    )


FUSED = _torch_adamw(
    "adamw_torch_fused",
    "fused",
    step_count=Storages.of(STEP_COUNT_BYTES),
    host_state_bytes=0,
    roots=False,
    passes=7,  # reads p, g, m, v; writes p, m, v
    host_kernel="one_pass",
)
FOREACH = _torch_adamw(
    "adamw_torch",
    "foreach",
    step_count=NO_STORAGES,
    host_state_bytes=STEP_COUNT_BYTES,
    roots=True,
    passes=19,  # eight passes over lists of tensors
    host_kernel="many_passes",
)
