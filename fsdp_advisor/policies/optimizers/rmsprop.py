"""RMSprop of torch, neither centered nor with momentum. Source: torch/optim/rmsprop.py, `_multi_tensor_rmsprop` (torch 2.13)."""

from __future__ import annotations

from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import Constructor, NamedOptimizer

STEP_COUNT_BYTES = 4
_CONSTRUCTOR = Constructor(module="torch.optim", name="RMSprop", options={"foreach": True})
_BY_DEEPSPEED = NamedOptimizer(name="RMSprop")  # DeepSpeed makes the class of torch.optim, on the host too

RMSPROP = Elementwise(
    name="rmsprop",
    script=_CONSTRUCTOR,
    transformers=NamedOptimizer(name="rmsprop"),
    deepspeed=_BY_DEEPSPEED,
    deepspeed_offloaded=_BY_DEEPSPEED,
    measured=_CONSTRUCTOR,
    measured_zero1=_CONSTRUCTOR,
    fsdp2=None,
    host_kernel="many_passes",
    deepspeed_host_kernel="many_passes",
    is_cpu_adam=False,
    host_state_bytes=STEP_COUNT_BYTES,
    moments=1,
    temporaries=1,  # the square roots
    passes=13,  # v twice, its root twice, and the parameter: 2 + 3 + 2 + 2 + 4 tensors
)
