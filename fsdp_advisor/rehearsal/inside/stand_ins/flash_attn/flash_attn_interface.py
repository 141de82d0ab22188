"""The functions of flash_attn.flash_attn_interface. They save the same tensors for backward and allocate the same gradients.

Forward saves queries, keys and values (heads padded to a multiple of 8), the output, the log-sum-exp and the state of the random
numbers. Backward allocates a gradient for each tensor that was given, a packed one for packed tensors. The calls of the extension are
operators, which torch.compile does not look into.

Source of names, defaults and order of arguments: flash_attn/flash_attn_interface.py (2.8.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flash_attn_2_cuda  # type: ignore[import-not-found]  # the extension, or the module beside this package
import torch

Tensor = torch.Tensor
BLOCK = 128
"""The numbers of rows of queries and keys are rounded up to multiples of this."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments of a call other than queries, keys and values. `lengths`: cumulative lengths of sequences in one row."""

    dropout: float
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    slopes: Tensor | None
    deterministic: bool
    returns_probabilities: bool
    lengths: tuple[Tensor, Tensor, int, int] | None = None
    block_table: Tensor | None = None


def _unpacked(given: tuple[Tensor, ...]) -> list[Tensor]:
    """Queries, keys and values of (q, k, v), (q, kv) or (qkv,). Packed tensors have them in the third dimension from the end."""
    *separate, packed = given
    if len(given) == 3:
        return [*separate, packed]
    return [*separate, *packed.unbind(dim=-3)]


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Attention(torch.autograd.Function):
    """Attention over one, two or three tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, with_gradients: bool, *given: Tensor) -> Any:
        q, k, v = map(_padded, _unpacked(given))
        scale = call.scale if call.scale is not None else given[0].shape[-1] ** -0.5
        out, sums, probabilities, random_state = _run_forward(q, k, v, scale, call)
        if with_gradients and any(tensor.requires_grad for tensor in given):
            lengths = call.lengths[:2] if call.lengths is not None else ()
            ctx.save_for_backward(q, k, v, out, sums, random_state, *lengths)
            ctx.call, ctx.scale, ctx.tensors = call, scale, len(given)
        out = out[..., : given[0].shape[-1]]
        return (out, sums, probabilities) if call.returns_probabilities else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, random_state, *lengths = ctx.saved_tensors
        allocated, (dq, dk, dv) = _gradients(q, k, v, ctx.tensors)
        head = dout.shape[-1]
        tensors = [_padded(dout), q, k, v, out]
        _run_backward(tensors, sums, (dq, dk, dv), random_state, ctx.scale, ctx.call, lengths)
        return None, None, *(each[..., :head] for each in allocated)


def _gradients(q: Tensor, k: Tensor, v: Tensor, tensors: int) -> tuple[list[Tensor], list[Tensor]]:
    """(the gradients of the given tensors, views of them for queries, keys and values). `tensors`: the number of given tensors, 1 to 3."""
    if tensors == 3:
        allocated = [torch.empty_like(each) for each in (q, k, v)]
        return allocated, allocated
    separate = [torch.empty_like(q)] if tensors == 2 else []
    like, parts = (k, 2) if tensors == 2 else (q, 3)
    packed = like.new_empty((*like.shape[:-2], parts, *like.shape[-2:]))
    return [*separate, packed], [*separate, *packed.unbind(dim=-3)]


def _run_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, call: _Call) -> tuple[Tensor, ...]:
    limits = (call.dropout, scale, call.causal, *call.window, call.softcap, call.slopes)
    probabilities = call.returns_probabilities and call.dropout > 0
    if call.lengths is None:
        found: tuple[Tensor, ...] = _forward(q, k, v, *limits, probabilities)
    else:
        found = _varlen_forward(q, k, v, *call.lengths, *limits, probabilities, call.block_table)
    return found


def _run_backward(
    tensors: list[Tensor], sums: Tensor, gradients: tuple[Tensor, ...], random_state: Tensor, scale: float, call: _Call,
    lengths: list[Tensor],
) -> None:  # fmt: skip
    limits = (
        call.dropout,
        scale,
        call.causal,
        *call.window,
        call.softcap,
        call.slopes,
        call.deterministic,
        random_state,
    )
    if call.lengths is None:
        _backward(*tensors, sums, *gradients, *limits)
    else:
        _varlen_backward(*tensors, sums, *gradients, *lengths, *call.lengths[2:], *limits)


# The operators. PyTorch reads the types of their arguments from the annotations.


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = map(_contiguous, (q, k, v))
    limits = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, return_softmax, None)
    return tuple(flash_attn_2_cuda.fwd(q, k, v, None, alibi_slopes, *limits))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    (b, t, h, _), keys, returns_probabilities = q.shape, k.shape[1], args[-1]
    shape = (b, h, _rounded(t), _rounded(keys)) if returns_probabilities else (0,)
    sums = q.new_empty((b, h, t), dtype=torch.float32)
    return torch.empty_like(_contiguous(q)), sums, q.new_empty(shape), q.new_empty((2,), dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), device_types="cuda")
def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, return_softmax: bool, block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = map(_contiguous, (q, k, v))
    return tuple(
        flash_attn_2_cuda.varlen_fwd(
            q,
            k,
            v,
            None,
            cu_seqlens_q,
            cu_seqlens_k,
            None,
            None,
            block_table,
            alibi_slopes,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            False,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            return_softmax,
            None,
        )
    )


@_varlen_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    most_queries: int,
    most_keys: int,
    *args: object,
) -> tuple[Tensor, ...]:
    (total, h, _), returns_probabilities = q.shape, args[-2]
    shape = (of_queries.numel() - 1, h, _rounded(most_queries), _rounded(most_keys)) if returns_probabilities else (0,)
    sums = q.new_empty((h, total), dtype=torch.float32)
    return torch.empty_like(_contiguous(q)), sums, q.new_empty(shape), q.new_empty((2,), dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda")
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor,
) -> Tensor:  # fmt: skip
    tensors = map(_contiguous, (dout, q, k, v, out))
    limits = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, None)
    found = flash_attn_2_cuda.bwd(*tensors, softmax_lse, dq, dk, dv, alibi_slopes, *limits, rng_state)
    return found[3]  # type: ignore[no-any-return]  # the extension is untyped


@_backward.register_fake
def _(dout: Tensor, q: Tensor, *args: object) -> Tensor:
    b, t, h, _ = q.shape
    return q.new_empty((b, h, _rounded(t)), dtype=torch.float32)


@torch.library.custom_op(
    "flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"), device_types="cuda"
)
def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor,
) -> Tensor:  # fmt: skip
    tensors = map(_contiguous, (dout, q, k, v, out))
    found = flash_attn_2_cuda.varlen_bwd(
        *tensors, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, False, causal, window_size_left, window_size_right, softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return found[3]  # type: ignore[no-any-return]  # the extension is untyped


@_varlen_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    of_queries: Tensor, *args: object,
) -> Tensor:  # fmt: skip
    total, h, _ = q.shape
    return q.new_empty((h, total + BLOCK * (of_queries.numel() - 1)), dtype=torch.float32)


def _rounded(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


# The package's functions


def _attention(call: _Call, *given: Tensor) -> Any:
    """The output; or (output, log-sum-exp, probabilities) if the call returns probabilities."""
    return _Attention.apply(call, torch.is_grad_enabled(), *given)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of queries (B, T, H, D) over keys and values, which may have fewer heads."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs,
    )  # fmt: skip
    return _attention(call, q, k, v)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention over keys and values in one tensor of the shape (B, T, 2, H, D)."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs,
    )  # fmt: skip
    return _attention(call, q, kv)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of queries, keys and values in one tensor of the shape (B, T, 3, H, D)."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs,
    )  # fmt: skip
    return _attention(call, qkv)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention within sequences that are concatenated in one row: q has the shape (total, H, D), and cumulative lengths are given."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs, block_table=block_table,
        lengths=(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)),
    )  # fmt: skip
    return _attention(call, q, k, v)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_varlen_func`, with keys and values in one tensor of the shape (total, 2, H, D)."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs,
        lengths=(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)),
    )  # fmt: skip
    return _attention(call, q, kv)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_varlen_func`, with queries, keys and values in one tensor of the shape (total, 3, H, D)."""
    call = _Call(
        dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes,
        deterministic=deterministic, returns_probabilities=return_attn_probs,
        lengths=(cu_seqlens, cu_seqlens, int(max_seqlen), int(max_seqlen)),
    )  # fmt: skip
    return _attention(call, qkv)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention over a cache of keys and values, without backward. The cache is not changed."""
    lengths = cache_seqlens
    if isinstance(lengths, int):
        lengths = torch.full((k_cache.shape[0],), lengths, dtype=torch.int32, device=k_cache.device)
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    out, sums = flash_attn_2_cuda.fwd_kvcache(
        _contiguous(q), k_cache, v_cache, k, v, lengths, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, None, scale, causal, *window_size, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return (out, sums) if return_softmax_lse else out
