"""Adagrad of torch. Its state exists from its construction, before the first step.

Source: torch/optim/adagrad.py, `Adagrad.__init__`, `_multi_tensor_adagrad` (torch 2.13).
"""

from __future__ import annotations

from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import Constructor, NamedOptimizer, Refusal

STEP_COUNT_BYTES = 4
_CONSTRUCTOR = Constructor(module="torch.optim", name="Adagrad", options={"foreach": True})
_NOT_DEEPSPEED = Refusal("DeepSpeed also keeps the sums of whole parameters that Adagrad makes at its construction")

ADAGRAD = Elementwise(
    name="adagrad",
    script=_CONSTRUCTOR,
    transformers=NamedOptimizer(name="adagrad"),
    deepspeed=_NOT_DEEPSPEED,
    deepspeed_offloaded=_NOT_DEEPSPEED,
    measured=_CONSTRUCTOR,
    measured_zero1=_CONSTRUCTOR,
    fsdp2=None,
    host_kernel="many_passes",
    deepspeed_host_kernel="many_passes",
    is_cpu_adam=False,
    host_state_bytes=STEP_COUNT_BYTES,
    moments=1,
    temporaries=2,  # the square roots, and the gradient times the learning rate
    passes=13,  # the sum, its root twice, the gradient, and the parameter: 3 + 2 + 2 + 2 + 4 tensors
)
