"""The functions of flash_attn.bert_padding: they extract the tokens of a padded batch, and insert them again.

Forward of `index_first_axis` gathers rows, and its backward scatters them into zeros. Source: flash_attn/bert_padding.py (2.8.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _expanded(indices: Tensor, width: int) -> Tensor:
    """The row indices expanded to `width` elements per row, as a view."""
    return indices.unsqueeze(1).expand(-1, width)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = tensor.shape[0]
        flat = tensor.reshape(tensor.shape[0], -1)
        return torch.gather(flat, 0, _expanded(indices, flat.shape[1])).reshape(-1, *tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        flat = gradient.reshape(gradient.shape[0], -1)
        found = flat.new_zeros((ctx.rows, flat.shape[1]))
        found.scatter_(0, _expanded(indices, flat.shape[1]), flat)
        return found.reshape(ctx.rows, *gradient.shape[1:]), None


class _PutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(indices)
        found = values.new_zeros((rows, *values.shape[1:]))
        found[indices] = values
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


index_first_axis: Callable[[Tensor, Tensor], Tensor] = _TakeRows.apply
index_put_first_axis: Callable[[Tensor, Tensor, int], Tensor] = _PutRows.apply


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, their indices, the cumulative lengths, the longest length, and the lengths without unused tokens."""
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(dim=-1, dtype=torch.int32)
    in_use = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(taken.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    cumulative = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = hidden_states.reshape(-1, *hidden_states.shape[2:])
    return index_first_axis(rows, places), places, cumulative, int(longest), in_use


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch of shape (batch, seqlen, ...): tokens at their indices, and zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *hidden_states.shape[1:])
