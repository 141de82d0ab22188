"""What an optimizer keeps per parameter, and what its step allocates.

Source: torch.optim.adam (`_init_group`, `_multi_tensor_adam`, `_fused_adam`), torch.optim.sgd, torch.optim._adafactor
(torch 2.13); bitsandbytes.optim (Optimizer2State, blockwise 8-bit states with one fp32 absmax per 256 values).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.program.storages import NO_STORAGES, Storages

BLOCK_8BIT = 256
MIN_8BIT_ELEMENTS = 4096
STEP_BYTES = 4
NORM_BYTES = 4
"""Clipping takes the norm of each gradient, an fp32 scalar (torch/nn/utils/clip_grad.py, _get_total_norm)."""

Shape = Sequence[int]


def kept(optim: str, shape: Shape, element_bytes: int) -> Storages:
    """States of one trainable parameter of this local shape; nothing for an empty one.

    fused AdamW keeps its step count on the GPU (one fp32 scalar), foreach AdamW on the host.
    >>> kept("adamw_torch", (128,), 4).exact, kept("adamw_torch_fused", (128,), 4).exact, kept("sgd", (128,), 4).exact
    (1024, 1028, 0)
    """
    elements = prod(shape)
    if not elements:
        return NO_STORAGES
    tensor = Storages.of(elements * element_bytes)
    match optim:
        case "adamw_torch_fused":
            return Storages.of(STEP_BYTES) + tensor * 2
        case "adamw_torch":
            return tensor * 2
        case "sgd":
            return NO_STORAGES
        case "sgd_momentum":
            return tensor
        case "adamw_bnb_8bit":
            if elements < MIN_8BIT_ELEMENTS:
                return Storages.of(elements * 4) * 2
            return (Storages.of(elements) + Storages.of(-(-elements // BLOCK_8BIT) * 4)) * 2
        case "adafactor":
            if len(shape) < 2:
                return tensor
            return Storages.of(elements // shape[-1] * element_bytes) + Storages.of(
                elements // shape[-2] * element_bytes
            )
        case _:
            raise ValueError(optim)


def step_temporaries(optim: str, shapes: Iterable[Shape], element_bytes: int) -> Storages:
    """What is alive at the highest moment inside one step over the local shapes.

    foreach AdamW holds the square roots of all second moments at once, foreach Adafactor all updates (`_multi_tensor_adafactor`);
    fused AdamW and SGD nothing; 8-bit AdamW nothing (in place).
    """
    sizes = [prod(s) for s in shapes]
    if not sizes:
        return NO_STORAGES
    match optim:
        case "adamw_torch" | "adafactor":
            return sum((Storages.of(n * element_bytes) for n in sizes), NO_STORAGES)
        case "adamw_torch_fused" | "sgd" | "sgd_momentum" | "adamw_bnb_8bit":
            return NO_STORAGES
        case _:
            raise ValueError(optim)


def one_by_one(plan: Plan) -> bool:
    """Whether the step takes one parameter after the other: the Trainer's Adafactor is transformers' own, not torch's."""
    return plan.optim == "adafactor" and plan.framework == "trainer"


def one_update(shape: Shape) -> Storages:
    """What transformers' Adafactor makes of one parameter, in fp32: `grad**2` and the update (transformers/optimization.py)."""
    return Storages.of(prod(shape) * 4, 2)
