"""TRL's head in tiles of tokens and of the vocabulary, which its trainers use by default."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.losses.fused import LossInputs, computes_in, loss_product
from fsdp_advisor.recording.tiles import Tile, sized_by

TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""Tokens and vocabulary entries of a tile. Source: trl 1.16, kernels/chunked_logprob.py and trainer/utils.py."""


def loss(inputs: LossInputs) -> torch.Tensor:
    """Log-probabilities in tiles. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`; sft_trainer.py, `compute_loss`."""
    outputs = ("log_probs", "entropy", "is_top1")
    return log_probs(inputs, outputs=outputs)["loss"]


def log_probs(
    inputs: LossInputs,
    *,
    outputs: tuple[str, ...],
    sequences: int = 1,
    completion_length: int = 0,
) -> dict[str, torch.Tensor]:
    """The outputs of a model with TRL's head, by name. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`.

    `sequences`: sequences per example of the batch. `completion_length`: the number of last tokens of a sequence that are scored; 0: all
    tokens but the first.
    """
    tile = Tile.of(
        inputs.examples,
        unscored=1,
        scored=completion_length,
        most=TILE_TOKENS,
        ignored=inputs.ignored,
        sequences=sequences,
    )
    hidden, labels = inputs.hidden[:, :-1], inputs.labels[:, 1:]
    mask = labels != -100
    rows, columns = _indices(mask, inputs.scored)
    computed = _TiledLogProbs.apply(
        hidden[rows, columns], inputs.weight, inputs.bias, labels[rows, columns], tile, outputs
    )  # type: ignore[no-untyped-call]  # torch's
    found = {
        name: x.new_zeros(mask.shape).masked_scatter(mask, x)
        for name, x in zip(OUTPUTS, computed, strict=True)
        if x is not None
    }
    del computed
    return {"loss": (-found["log_probs"]).sum() / mask.sum().clamp(min=1), **found}


def _indices(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The rows and columns of the `count` true elements of `mask`. (The values of fake tensors are unknown, so `count` is given.)"""
    found = mask.new_empty((count, 2), dtype=torch.long)
    return found.unbind(1)


OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
"""The outputs per token that TRL's head can compute. A trainer requests some of them."""


class _TiledLogProbs(torch.autograd.Function):
    """`ChunkedLogProbFunction` of trl 1.16 (kernels/chunked_logprob.py).

    hidden (N, H), weight (V, H), targets (N). Forward reduces each tile of the logits to statistics per token; backward computes the tile
    again and adds its products to gradients in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tile: Tile,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.tile = computes_in(hidden), tile
        largest, total, weighted, _, summed, before_target, target = (
            torch.zeros((hidden.shape[0],), dtype=torch.float32) for _ in range(7)
        )
        buffers = _tile_of(hidden, tile, ctx.dtype)
        for first in range(0, weight.shape[0], TILE_VOCABULARY):
            part = weight[first : first + TILE_VOCABULARY].to(ctx.dtype)
            loss_product(hidden, part, 3 * ctx.dtype.itemsize)
            del part
        log_z = largest + torch.log(total)
        log_probs = target - log_z
        entropy = log_z - weighted / total if "entropy" in outputs else None
        mean_logits = summed / weight.shape[0] if "mean_logits" in outputs else None
        is_top1 = (target >= largest) & (target > before_target) if "is_top1" in outputs else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z if entropy is None else entropy)
        ctx.mark_non_differentiable(*(x for x in (mean_logits, is_top1) if x is not None))
        del buffers
        return log_probs, entropy, mean_logits, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        for_hidden, for_weight, for_bias = (
            torch.zeros(x.shape, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        buffers = _tile_of(hidden, ctx.tile, ctx.dtype)
        for first in range(0, weight.shape[0], TILE_VOCABULARY):
            part = weight[first : first + TILE_VOCABULARY].to(ctx.dtype)  # the previous part is still alive
            loss_product(hidden, part, 4 * ctx.dtype.itemsize)
            for gradient in (for_hidden, for_weight):
                if gradient is not None:
                    loss_product(hidden, part, ctx.dtype.itemsize)
        if part.dtype != weight.dtype and weight.shape[0] <= TILE_VOCABULARY and ctx.tile.has_second:
            with sized_by(ctx.tile.second):  # the next tile of tokens casts the only part again
                weight[:TILE_VOCABULARY].to(ctx.dtype)
        results = [
            gradient.to(x.dtype) if gradient is not None else None
            for gradient, x in zip((for_hidden, for_weight, for_bias), (hidden, weight, bias), strict=True)
        ]
        del buffers
        return (*results, None, None, None)


def _tile_of(hidden: torch.Tensor, tile: Tile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of a tile, and its hidden states if they are cast, else None."""
    with sized_by(tile):
        logits = torch.empty((tile.tokens, TILE_VOCABULARY), dtype=dtype)
        return logits, torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype) if hidden.dtype != dtype else None
