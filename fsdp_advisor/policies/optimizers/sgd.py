"""SGD of torch, without and with momentum. Source: torch/optim/sgd.py (torch 2.13)."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.policies.optimizers.elementwise import Elementwise
from fsdp_advisor.policies.optimizers.interface import NO_OPTIONS, Constructor, NamedOptimizer, Option


def _torch_sgd(name: OptimizerName, options: Mapping[str, Option], *, moments: int, passes: int) -> Elementwise:
    constructor = Constructor(module="torch.optim", name="SGD", options={**options, "foreach": True})
    by_deepspeed = NamedOptimizer(name="SGD", options=options)  # DeepSpeed makes the class of torch.optim
    return Elementwise(
        name=name,
        script=constructor,
        transformers=NamedOptimizer(name="sgd", options=options),
        deepspeed=by_deepspeed,
        deepspeed_offloaded=by_deepspeed,
        host_kernel="many_passes",
        deepspeed_host_kernel="one_pass",
        is_cpu_adam=False,
        moments=moments,
        temporaries=0,
        passes=passes,
    )


PLAIN = _torch_sgd("sgd", NO_OPTIONS, moments=0, passes=3)  # reads p and g, writes p
MOMENTUM = _torch_sgd("sgd_momentum", {"momentum": 0.9}, moments=1, passes=5)  # also reads and writes the buffer
