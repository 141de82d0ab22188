"""The allocations of FlashAttention-2 (outputs, saved tensors, scratch), for recording on a machine without the kernel.

q, k, v have shape (B, T, H, D). Forward saves q, k, v, the output and one fp32 log-sum-exp per row and head. Backward allocates
dq, dk, dv. Its scratch is an fp32 accumulator of dq, one fp32 per row, and dk, dv per query head if heads share keys.
Source: Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp, `mha_fwd` and `mha_bwd`.

cuDNN's kernel allocates the same, with three differences: it accepts a mask and saves it, it accepts values of another width,
and its scratch is only the accumulator and the fp32 per row. Source: ATen/native/cudnn/MHA.cpp (torch 2.13) and cudnn-frontend's
`sdpa_backward`. The output has the memory layout of q, and each gradient that of its tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.modeling_flash_attention_utils import _index_first_axis, _is_packed_sequence

from fsdp_advisor.job.batch_layout import BatchLayout
from fsdp_advisor.recording.fake_operators import fake_operator

NAME = "recorded_fused_attention"  # transformers looks for a kernel package behind any name with "flash" in it
VARLEN = "recorded_varlen_attention"
"""The name of the attention for sequences of several lengths, in one row or padded. `NAME` is for sequences of one length."""
HEAD_ROUNDING = 32


class _Scratch:
    """Whether allocations are currently counted as a kernel's scratch instead of a tensor of the model."""

    active = False


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Context in which allocations count as a kernel's scratch."""
    _Scratch.active = True
    try:
        yield
    finally:
        _Scratch.active = False


def in_scratch() -> bool:
    """Whether the running code is within `scratch`."""
    return _Scratch.active


@fake_operator("flash_attention")
def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shape (B, T, H, D), and the logarithm of the softmax's sums, (B, H, T) in fp32. Only for fake tensors."""
    b, t, h, _ = q.shape
    return torch.empty_like(q[..., : v.shape[3]]), q.new_empty((b, h, t), dtype=torch.float32)


@fake_operator("flash_attention_backward")
def flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v. Only for fake tensors."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, cudnn: bool
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.scratch = cudnn_scratch if cudnn else flash_scratch
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, out, lse = ctx.saved_tensors
        with scratch():
            taken = ctx.scratch(q, k)
        dq, dk, dv = flash_backward(grads[0].contiguous(), q, k, v, out, lse)
        del taken
        return dq, dk, dv, None, None


def flash_scratch(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """The temporaries of FlashAttention's backward: dq in fp32 with D rounded up, one fp32 value per row and head, and dk and dv for all
    heads of q if k has fewer. q and k have shape (B, T, H, D).
    """
    b, t, h, d = q.shape
    rounded = -(-d // HEAD_ROUNDING) * HEAD_ROUNDING
    taken = [q.new_empty((b, t, h, rounded), dtype=torch.float32), q.new_empty((b, h, t), dtype=torch.float32)]
    if k.shape[2] != h:
        taken += [q.new_empty((b, k.shape[1], h, d)), q.new_empty((b, k.shape[1], h, d))]
    return taken


def cudnn_scratch(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """The temporaries of cuDNN's backward: dq and a value per row and head, in fp32. q has shape (B, T, H, D)."""
    b, t, h, d = q.shape
    return [q.new_empty((b, t, h, d + 1), dtype=torch.float32)]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernel's output, of shape (B, T, H, D) like the inputs. Keys and values may have fewer heads."""
    out: torch.Tensor = _FlashAttention.apply(q, k, v, None, False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


class _FlexAttention(torch.autograd.Function):
    """`flex_attention` as torch.compile compiles it: one kernel in forward, and two in backward, for the sum over the products of
    gradient and output, and for the gradients. Source: torch/_inductor/kernel/flex/flex_attention.py (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        with scratch():
            largest = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        out, lse = flash_forward(q, k, v)
        del largest
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with scratch():
            delta = torch.empty_like(lse)
        gradients: tuple[torch.Tensor, ...] = flash_backward(grads[0].contiguous(), q, k, v, out, lse)
        del delta
        return gradients


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of compiled FlexAttention, of shape (B, T, H, D). The masks of blocks are not counted: 16 bytes per pair of blocks of
    128 tokens.
    """
    out: torch.Tensor = _FlexAttention.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The output of cuDNN's kernel, of shape (B, T, H, D). `bias` is an additive mask."""
    out: torch.Tensor = _FlashAttention.apply(q, k, v, bias, True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


# Sequences of several lengths


@dataclass(frozen=True)
class Rows:
    """The layout of the current batch's sequences. `padding`: the fraction of the tokens that are padding."""

    layout: BatchLayout
    sequences: int
    padding: float


class _Current:
    rows = Rows("full", 1, 0.0)


def use_rows(rows: Rows) -> None:
    """Set the batch layout for all following attention calls, also those that recompute in backward."""
    _Current.rows = rows


@fake_operator("flash_varlen")
def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shape (tokens, H, D), and the logarithm of the softmax's sums, (H, tokens) in fp32. Only for fake tensors."""
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@fake_operator("flash_varlen_backward")
def _varlen_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sequences: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class VarlenAttention(torch.autograd.Function):
    """`flash_attn_varlen_func`, over tensors of shape (tokens, H, D). `lengths`: the cumulative lengths of the sequences."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, sequences: int
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = varlen_forward(q, k, v, sequences)
        ctx.save_for_backward(q, k, v, out, lse, lengths)
        ctx.sequences = sequences
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, _ = ctx.saved_tensors
        with scratch():
            taken = varlen_scratch(q, k, ctx.sequences)
        gradients = _varlen_backward(grads[0].contiguous(), q, k, v, out, lse, ctx.sequences)
        del taken
        return (*gradients, None, None)


def varlen_scratch(q: torch.Tensor, k: torch.Tensor, sequences: int) -> list[torch.Tensor]:
    """As `flash_scratch`, for q and k of shape (tokens, H, D). It has 128 rows more for each sequence.

    Source: Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp, `mha_varlen_bwd`.
    """
    tokens, h, d = q.shape
    rounded = -(-d // HEAD_ROUNDING) * HEAD_ROUNDING
    rows = tokens + 128 * sequences
    taken = [q.new_empty((rows, h, rounded), dtype=torch.float32), q.new_empty((h, rows), dtype=torch.float32)]
    if k.shape[1] != h:
        taken += [q.new_empty((k.shape[0], h, d)), q.new_empty((k.shape[0], h, d))]
    return taken


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, sequences: int) -> torch.Tensor:
    """The output over `sequences` in one row, of cumulative `lengths`. q, k, v have shape (tokens, H, D)."""
    out: torch.Tensor = VarlenAttention.apply(q, k, v, lengths, sequences)  # type: ignore[no-untyped-call]  # torch's
    return out


class _PadInput(torch.autograd.Function):
    """A tensor of `rows` rows with the tokens (tokens, H, D) at their positions and zeros elsewhere. Source: flash-attention,
    flash_attn/bert_padding.py, `IndexPutFirstAxis`.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        padded = tokens.new_zeros((rows, *tokens.shape[1:]))
        padded[places] = tokens
        return padded

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None


def _with_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """transformers' `_flash_attention_forward` on a batch of `Rows`. Where it reads values of tensors, only the results are allocated.

    Source: transformers 5.23, modeling_flash_attention_utils.py. Not counted: the sort in the backward of indexing on CUDA, about 32
    bytes per token.
    """
    rows = _Current.rows
    batch, length = q.shape[:2]
    out: torch.Tensor
    if attention_mask is not None:
        sums = attention_mask.sum(dim=-1, dtype=torch.int32)
        real = batch * length - int(batch * length * rows.padding)
        places = attention_mask.new_empty((real, 1), dtype=torch.long).flatten()
        lengths = torch.nn.functional.pad(torch.cumsum(sums, dim=0, dtype=torch.int32), (1, 0))
        q, k, v = (_index_first_axis(x, places) for x in (q, k, v))
        out = varlen(q, k, v, lengths, rows.sequences)
        padded: torch.Tensor = _PadInput.apply(out, places, batch * length)  # type: ignore[no-untyped-call]  # torch's
        return padded.view(batch, length, *out.shape[1:])
    given: torch.Tensor | None = kwargs.get("cu_seq_lens_q")
    position_ids = kwargs.get("position_ids")
    if given is None and position_ids is not None:
        _is_packed_sequence(position_ids, batch)
        q, k, v = (x.contiguous() for x in (q, k, v))
        starts = position_ids == position_ids.min()
        given = starts.new_empty((rows.sequences + 1,), dtype=torch.int32)
        del starts
    if given is None:
        return flash(q, k, v)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = varlen(q, k, v, given, rows.sequences)
    return out.view(batch, -1, *out.shape[1:])


def _in_one_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The output over sequences in one row, of cumulative `lengths`. q, k, v have shape (1, tokens, H, D)."""
    return varlen(q[0], k[0], v[0], lengths, lengths.numel() - 1)[None]


# transformers' interface


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `flash_attention_forward` (integrations/flash_attention.py) with `flash` or `_with_rows` instead of the kernel."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if v_head_dim != head_dim:
        v = torch.nn.functional.pad(v, [0, head_dim - v_head_dim])
    if (dtype := get_target_dtype(q, module)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    config: Any = module.config
    if config._attn_implementation == VARLEN:
        out = _with_rows(q, k, v, attention_mask, **kwargs)
    elif (lengths := kwargs.get("cu_seq_lens_q")) is not None:  # the images of a vision tower are in one row
        out = _in_one_row(q, k, v, lengths)
    else:
        out = flash(q, k, v)
    return (out if v_head_dim == head_dim else out[..., :v_head_dim]), None


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(VARLEN, _attention)


def _no_mask(*_: Any, **__: Any) -> None:
    """The result of transformers' `flash_attention_mask` without padding. transformers' version reads the values of a mask that
    some models make (OPT in 5.17), which is impossible under fake tensors.
    """


AttentionMaskInterface.register(NAME, _no_mask)


def _mask_of_padding(attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """The result of `flash_attention_mask` with padding: the mask of the batch."""
    return attention_mask


AttentionMaskInterface.register(VARLEN, _mask_of_padding)
