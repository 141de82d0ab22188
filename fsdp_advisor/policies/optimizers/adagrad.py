"""Adagrad of torch. Its state exists from its construction, before the first step.

Source: torch/optim/adagrad.py, `Adagrad.__init__`, `_multi_tensor_adagrad` (torch 2.13).
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_advisor.policies.optimizers.elementwise import with_one_moment
from fsdp_advisor.policies.optimizers.interface import Refusal

ADAGRAD = replace(
    with_one_moment(
        "adagrad",
        "Adagrad",
        Refusal("DeepSpeed also keeps the sums of whole parameters that Adagrad makes at its construction"),
        temporaries=2,  # the square roots, and the gradient times the learning rate
        passes=13,  # the sum, its root twice, the gradient, and the parameter: 3 + 2 + 2 + 2 + 4 tensors
    ),
    made_with_state=True,
)
