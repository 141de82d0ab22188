"""RMSprop of torch, neither centered nor with momentum. Source: torch/optim/rmsprop.py, `_multi_tensor_rmsprop` (torch 2.13)."""

from __future__ import annotations

from fsdp_advisor.policies.optimizers.elementwise import with_one_moment
from fsdp_advisor.policies.optimizers.interface import NamedOptimizer

RMSPROP = with_one_moment(
    "rmsprop",
    "RMSprop",
    NamedOptimizer(name="RMSprop"),  # DeepSpeed makes the class of torch.optim, on the host too
    temporaries=1,  # the square roots
    passes=13,  # v (2 + 3), its root (2 + 2), the parameter (4)
)
