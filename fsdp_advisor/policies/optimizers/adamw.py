"""AdamW of torch, fused and foreach.

Source: torch/optim/adam.py, `_init_group`, `_multi_tensor_adam`, `_fused_adam` (torch 2.13); under DeepSpeed's offload
deepspeed/ops/adam/cpu_adam.py (0.19.8).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import (
    STEP_COUNT_BYTES,
    Constructor,
    NamedOptimizer,
    Shape,
)
from fsdp_advisor.program.instructions import HostKernel
from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass(frozen=True, kw_only=True)
class AdamW(Elementwise):
    """AdamW: two moments in the parameter's dtype, and a step count. DeepSpeedCPUAdam's moments have the masters' dtype.

    `step_count`: storages of the step count on the GPU.
    """

    step_count: Storages

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        elements = prod(shape)
        if not elements:
            return NO_STORAGES
        return self.step_count + Storages.of(elements * element_bytes) * 2

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        return Storages.of(elements * element_bytes, 2) + self.step_count


def _torch_adamw(
    name: OptimizerName,
    implementation: str,
    *,
    step_count: Storages,
    host_state_bytes: int,
    temporaries: int,
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
        host_kernel=host_kernel,
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=True,
        step_count=step_count,
        host_state_bytes=host_state_bytes,
        moments=2,
        temporaries=temporaries,
        passes=passes,
    )


FUSED = _torch_adamw(
    "adamw_torch_fused",
    "fused",
    step_count=Storages.of(STEP_COUNT_BYTES),
    host_state_bytes=0,
    temporaries=0,
    passes=7,  # reads p, g, m, v; writes p, m, v
    host_kernel="one_pass",
)
FOREACH = _torch_adamw(
    "adamw_torch",
    "foreach",
    step_count=NO_STORAGES,
    host_state_bytes=STEP_COUNT_BYTES,
    temporaries=1,  # the roots of all second moments exist at the same time
    passes=19,  # eight passes over lists of tensors
    host_kernel="many_passes",
)
