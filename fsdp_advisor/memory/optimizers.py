"""What an optimizer keeps per parameter, and what its step allocates.

Source: torch.optim.adam (`_init_group`, `_multi_tensor_adam`, `_fused_adam`), torch.optim.sgd, torch.optim._adafactor
(torch 2.13); bitsandbytes.optim (Optimizer2State, blockwise 8-bit states with one fp32 absmax per 256 values).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fsdp_advisor.memory.held import NOTHING, Held
from fsdp_advisor.plan import Plan

BLOCK_8BIT = 256
MIN_8BIT_ELEMENTS = 4096
STEP_BYTES = 4
NORM_BYTES = 4
"""Clipping takes the norm of each gradient, an fp32 scalar (torch/nn/utils/clip_grad.py, _get_total_norm)."""

Shape = Sequence[int]


def kept(optim: str, shape: Shape, element_bytes: int) -> Held:
    """States of one trainable parameter of this local shape; nothing for an empty one.

    fused AdamW keeps its step count on the GPU (one fp32 scalar), foreach AdamW on the host.
    >>> kept("adamw_torch", (128,), 4).exact, kept("adamw_torch_fused", (128,), 4).exact, kept("sgd", (128,), 4).exact
    (1024, 1028, 0)
    """
    elements = prod(shape)
    if not elements:
        return NOTHING
    tensor = Held.of(elements * element_bytes)
    match optim:
        case "adamw_torch_fused":
            return Held.of(STEP_BYTES) + tensor * 2
        case "adamw_torch":
            return tensor * 2
        case "sgd":
            return NOTHING
        case "sgd_momentum":
            return tensor
        case "adamw_bnb_8bit":
            if elements < MIN_8BIT_ELEMENTS:
                return Held.of(elements * 4) * 2
            return (Held.of(elements) + Held.of(-(-elements // BLOCK_8BIT) * 4)) * 2
        case "adafactor":
            if len(shape) < 2:
                return tensor
            return Held.of(elements // shape[-1] * element_bytes) + Held.of(elements // shape[-2] * element_bytes)
        case _:
            raise ValueError(optim)


def step_temporaries(optim: str, shapes: Iterable[Shape], element_bytes: int) -> Held:
    """What is alive at the highest moment inside one step over the local shapes.

    foreach AdamW holds the square roots of all second moments at once, foreach Adafactor all updates (`_multi_tensor_adafactor`);
    fused AdamW and SGD nothing; 8-bit AdamW nothing (in place).
    """
    sizes = [prod(s) for s in shapes]
    if not sizes:
        return NOTHING
    match optim:
        case "adamw_torch" | "adafactor":
            return sum((Held.of(n * element_bytes) for n in sizes), NOTHING)
        case "adamw_torch_fused" | "sgd" | "sgd_momentum" | "adamw_bnb_8bit":
            return NOTHING
        case _:
            raise ValueError(optim)


def one_by_one(plan: Plan) -> bool:
    """Whether the step takes one parameter after the other: the Trainer's Adafactor is transformers' own, not torch's."""
    return plan.optim == "adafactor" and plan.framework == "trainer"


def one_update(shape: Shape) -> Held:
    """What transformers' Adafactor makes of one parameter, in fp32: `grad**2` and the update (transformers/optimization.py)."""
    return Held.of(prod(shape) * 4, 2)
