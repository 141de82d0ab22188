"""Liger's fused linear cross entropy, which transformers' Trainer uses with `use_liger_kernel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_advisor.recording.losses.fused import LossInputs, computes_in, loss_product
from fsdp_advisor.recording.tiles import Tile, sized_by


def loss(inputs: LossInputs) -> torch.Tensor:
    """Liger's fused loss of the labels, divided by their number.

    Source: liger-kernel 0.8.5, transformers/model/loss_utils.py, `LigerForCausalLMLoss` with `num_items_in_batch`.
    """
    vocabulary, width = inputs.weight.shape
    tile = Tile.of(inputs.examples, parts=-(-vocabulary // width))
    shifted = nn.functional.pad(inputs.labels, (0, 1), value=-100)[..., 1:].contiguous()
    mean: torch.Tensor = _LigerLoss.apply(
        inputs.hidden.view(-1, width), inputs.weight, inputs.bias, shifted.view(-1), tile
    )  # type: ignore[no-untyped-call]  # torch's
    return mean / torch.empty((), dtype=torch.long)


class _LigerLoss(torch.autograd.Function):
    """`LigerFusedLinearCrossEntropyFunction` of liger-kernel 0.8.5 (ops/fused_linear_cross_entropy.py): forward computes the
    gradients too, tile by tile, in the parameter's dtype.

    hidden (N, H), weight (V, H), targets (N). The number of tokens of a tile is chosen so that its logits are about as large as all hidden
    states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tile: Tile,
    ) -> torch.Tensor:
        for_hidden = torch.zeros_like(hidden)
        trains = hidden.requires_grad
        for_weight = torch.zeros_like(weight) if trains and weight.requires_grad else None
        for_bias = torch.zeros_like(bias) if trains and bias is not None else None
        losses = torch.zeros(hidden.shape[0], dtype=torch.float32)
        mask = targets != -100
        dtype = computes_in(hidden)
        in_place = hidden.dtype == weight.dtype == dtype and (bias is None or bias.dtype == dtype)
        for _ in range(1 if in_place else 2):  # autocast's cache makes the second tile differ from the first
            logits = _logits(hidden, weight, bias, tile, dtype, in_place)
            if trains and not in_place:
                _product_of_casts(hidden, weight, tile, dtype)
            if for_weight is not None and dtype == torch.float32:  # fp32: the product is added separately
                for_weight += torch.empty_like(weight).float()
            elif for_weight is not None and hidden.dtype != dtype:
                with sized_by(tile):
                    factor = torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype)
                del factor
            if not in_place:
                del logits
        for trained in (True, trains, for_weight is not None):
            if trained:
                loss_product(hidden, weight, 2 * dtype.itemsize)
        del mask
        loss = torch.sum(losses)
        ctx.save_for_backward(for_hidden, for_weight, for_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that forward computed, scaled in place by a kernel."""
        return (*ctx.saved_tensors, None, None)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
    in_place: bool,
) -> torch.Tensor:
    """A tile's logits. Unless they are computed in place, autocast casts hidden states and weight in each tile."""
    vocabulary, width = weight.shape
    with sized_by(tile):
        part = torch.empty((tile.tokens, width), dtype=dtype) if hidden.dtype != dtype else None
    cast = weight.to(dtype) if not in_place else None
    with sized_by(tile):
        logits = torch.empty((tile.tokens, vocabulary), dtype=dtype)
        del part, cast
        return logits if in_place or bias is None else torch.empty_like(logits)


def _product_of_casts(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile, dtype: torch.dtype) -> None:
    """The product of a tile's logits and the weight, which is then copied to the gradient. Autocast's cache keeps the weight's cast."""
    torch.mm(weight.new_empty((1, weight.shape[0]), dtype=dtype), weight)
    with sized_by(tile):
        product = torch.empty((tile.tokens, hidden.shape[1]), dtype=dtype)
    del product
