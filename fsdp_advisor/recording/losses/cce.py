"""Cut cross entropy, whose logits exist only in registers."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.losses.fused import LossInputs, loss_product

BLOCK_TOKENS = 128
"""The tokens for which the forward has one lock."""


def loss(inputs: LossInputs) -> torch.Tensor:
    """Cut cross entropy, as a mean over tokens. Source: cut-cross-entropy 25.1.1, cce.py, `cce_linear_cross_entropy(shift=True)`."""
    hidden, labels = inputs.hidden, inputs.labels
    if inputs.bias is not None:
        raise NotRecordable(
            "cut cross entropy does not support a head with a bias",
            hint="use --loss liger, chunked or full",
        )
    half = hidden.dtype if hidden.dtype != torch.float32 else torch.bfloat16  # its kernels accept only half precision
    valid = _valid_tokens(labels, inputs.scored)
    mean: torch.Tensor = _CutCrossEntropy.apply(
        hidden.to(half).contiguous().flatten(0, -2), inputs.weight, labels, valid
    )  # type: ignore[no-untyped-call]  # torch's
    return mean


def _valid_tokens(labels: torch.Tensor, scored: int) -> torch.Tensor:
    """The indices of the tokens with a label, in int32. Source: utils.py, `_build_flat_valids`."""
    mask = labels[..., 1:] != -100
    valid = mask.new_empty((scored, 2), dtype=torch.long).to(torch.int32)
    del mask
    return valid.sum(1)


class _CutCrossEntropy(torch.autograd.Function):
    """`LinearCrossEntropyFunction`: the logits exist only in registers. hidden (N, H), weight (V, H), `valid`: labelled tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        tokens, vocabulary = valid.shape[0], weight.shape[0]
        lse = hidden.new_zeros((tokens,), dtype=torch.float32)
        locks = hidden.new_zeros((-(-tokens // BLOCK_TOKENS),), dtype=torch.int32)
        averages = hidden.new_zeros((vocabulary,), dtype=torch.float32)
        loss_product(hidden, weight, 0)  # the logits stay in registers
        del locks
        losses = hidden.new_zeros((tokens,), dtype=torch.float32)
        losses.add_(lse)
        ctx.save_for_backward(hidden, weight, lse, targets, valid, averages)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _, _, valid, averages = ctx.saved_tensors
        order = torch.argsort(averages).to(torch.int32)
        for_hidden = torch.zeros_like(hidden)
        for_weight = torch.zeros_like(weight, dtype=hidden.dtype) if ctx.needs_input_grad[1] else None
        parts = -(-weight.shape[1] // 64)
        locks = [
            hidden.new_zeros((-(-rows // parts), parts), dtype=torch.int32)
            for rows in (valid.shape[0], weight.shape[0])
        ]
        for _ in range(3 if for_weight is not None else 2):  # recomputes the logits, and computes each gradient
            loss_product(hidden, weight, 0)
        del order, locks
        return for_hidden, for_weight.to(weight.dtype) if for_weight is not None else None, None, None
