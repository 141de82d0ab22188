"""The allocations of flash-attn's CUDA extension: forward and backward, dense and of sequences of several lengths, and with a cache.

B sequences of T tokens (S of keys) have H heads (G of keys) of D elements; `total` is the number of tokens of all sequences. Names and
order of the arguments are the extension's, because flash-attn's Python code passes most of them by position.

Source: csrc/flash_attn/flash_api.cpp (flash-attn 2.8.3): mha_fwd, mha_varlen_fwd, mha_bwd, mha_varlen_bwd, mha_fwd_kvcache,
set_params_splitkv and num_splits_heuristic.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor

BLOCK = 128
"""The numbers of rows of queries and keys are rounded up to multiples of this."""
MOST_SPLITS = 128
SPLIT_BLOCK = 64
"""Rows of queries that one block of the kernel with splits computes."""


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> list[Tensor]:
    """The output, the log-sum-exp, the probabilities if they are asked for, and the state of the random numbers."""
    _check(q, k, v)
    b, t, h, d = q.shape
    keys, groups = k.shape[1], k.shape[2]
    unlimited = not is_causal or t == 1
    limited = 0 <= window_size_left < keys or (0 <= window_size_right < keys) or not unlimited
    swapped = t == 1 and h > groups and not limited and p_dropout == 0 and alibi_slopes is None
    if swapped:  # a group's query heads become query rows of one head
        q, t, h = q.reshape(b, groups, h // groups, d).transpose(1, 2), h // groups, groups
    result = torch.empty_like(q) if out is None else out
    sums = q.new_empty((b, h, t), dtype=torch.float32)
    probabilities = q.new_empty((b, h, _rounded(t), _rounded(keys)) if return_softmax else (0,))
    partial = _partial_results(q, b, h, t, keys, d) if p_dropout == 0 else ()
    random_state = q.new_empty((2,), dtype=torch.int64)
    del partial
    if swapped:
        result = result.transpose(1, 2).reshape(b, 1, h * t, d)
        sums = sums.reshape(b, h * t, 1)
    return [result, sums, probabilities, random_state]


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> list[Tensor]:
    """As `fwd`, for sequences that are concatenated in one row: q has the shape (total, H, D)."""
    _check(q, k, v)
    (total, h, d), groups, b = q.shape, k.shape[-2], cu_seqlens_q.numel() - 1
    limited = window_size_left >= 0 or window_size_right >= 0 or (is_causal and max_seqlen_q > 1)
    swapped = max_seqlen_q == 1 and h > groups and not limited and p_dropout == 0 and alibi_slopes is None
    if swapped:
        q = q.reshape(b, groups, h // groups, d).transpose(1, 2).reshape(b * (h // groups), groups, d)
        total, max_seqlen_q, h = q.shape[0], h // groups, groups
    result = torch.empty_like(q) if out is None else out
    sums = q.new_empty((h, total), dtype=torch.float32)
    shape = (b, h, _rounded(max_seqlen_q), _rounded(max_seqlen_k))
    probabilities = q.new_empty(shape if return_softmax else (0,))
    partial = _partial_results(q, b, h, max_seqlen_q, max_seqlen_k, d) if swapped else ()
    random_state = q.new_empty((2,), dtype=torch.int64)
    del partial
    if swapped:
        result = result.reshape(b, max_seqlen_q, h, d).transpose(1, 2).reshape(b, h * max_seqlen_q, d)
        sums = sums.reshape(h * max_seqlen_q, b)
    return [result, sums, probabilities, random_state]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """The gradients of q, k and v, which the caller may provide, and the row sums of the gradient."""
    b, t, h, _ = q.shape
    return _gradients(q, k, v, (dq, dk, dv), (b, h, _rounded(t)), (b, _rounded(t)), deterministic, sequences=b)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """As `bwd`, for sequences that are concatenated in one row. The scratch has a block of additional rows per sequence."""
    sequences = cu_seqlens_q.numel() - 1
    rows = q.shape[0] + BLOCK * sequences
    return _gradients(q, k, v, (dq, dk, dv), (q.shape[1], rows), (rows,), deterministic, sequences)


def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """The output and the log-sum-exp of queries over a cache of keys and values. The cache is not changed."""
    _check(q, kcache, vcache)
    b, t, h, d = q.shape
    groups = kcache.shape[2]
    keys = kcache.shape[1] if block_table is None else block_table.shape[1] * kcache.shape[1]
    limited = window_size_left >= 0 or window_size_right >= 0 or (is_causal and t > 1)
    swapped = t == 1 and h > groups and not limited and d % 8 == 0 and alibi_slopes is None
    if swapped:
        q, t, h = q.reshape(b, groups, h // groups, d).transpose(1, 2), h // groups, groups
    padded = [torch.nn.functional.pad(each, (0, -d % 8)) if d % 8 else each for each in (q, kcache, vcache)]
    result = torch.empty_like(padded[0]) if out is None or d % 8 else out
    sums = q.new_empty((b, h, t), dtype=torch.float32)
    partial = _partial_results(q, b, h, t, keys, padded[0].shape[-1], num_splits)
    del partial, padded
    result = result[..., :d]
    if swapped:
        return [result.transpose(1, 2).reshape(b, 1, h * t, d), sums.reshape(b, h * t, 1)]
    return [result, sums]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise the extension's errors for dtypes, heads and GPUs that it does not support."""
    if torch.cuda.get_device_capability(q.device)[0] < 8:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if q.shape[-1] > 256 or q.shape[-2] % k.shape[-2]:
        raise RuntimeError(f"FlashAttention does not support queries {tuple(q.shape)} and keys {tuple(k.shape)}")


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: tuple[Tensor | None, ...],
    row_sums: tuple[int, ...],
    rows: tuple[int, ...],
    deterministic: bool,
    sequences: int,
) -> list[Tensor]:
    """The gradients of q, k and v. The kernel's scratch is allocated and freed: an fp32 copy of dq, and dk and dv for each query head."""
    h, groups = q.shape[-2], k.shape[-2]
    dq, dk, dv = (
        torch.empty_like(of) if gradient is None else gradient for of, gradient in zip((q, k, v), given, strict=True)
    )
    sums = q.new_empty(row_sums, dtype=torch.float32)
    shape = (*rows, h, _rounded_head(q.shape[-1]))
    if deterministic:
        splits = -(-_multiprocessors(q) // (sequences * h))
        accumulated = q.new_zeros((splits, *shape), dtype=torch.float32)
    else:
        accumulated = q.new_empty(shape, dtype=torch.float32)
    if groups != h:
        expanded = [q.new_empty((*k.shape[:-2], h, q.shape[-1])) for _ in range(2)]
        for gradient, each in zip((dk, dv), expanded, strict=True):
            of_group = each.reshape(*k.shape[:-2], groups, h // groups, q.shape[-1])
            torch.sum(of_group, dim=of_group.dim() - 2, out=gradient)
        del expanded, each, of_group
    del accumulated
    return [dq, dk, dv, sums]


def _partial_results(q: Tensor, b: int, h: int, t: int, keys: int, head: int, splits: int = 0) -> tuple[Tensor, ...]:
    """The log-sum-exp and the output of each part of the keys. Empty unless the kernel divides the keys, because there are few blocks
    of queries.
    """
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    splits = splits or _splits(b * h * -(-t // SPLIT_BLOCK), 2 * _multiprocessors(q), -(-keys // block))
    if splits <= 1:
        return ()
    return (
        q.new_empty((splits, b, h, t), dtype=torch.float32),
        q.new_empty((splits, b, h, t, _rounded_head(head)), dtype=torch.float32),
    )


def _splits(blocks: int, slots: int, key_blocks: int) -> int:
    """The number of parts of the keys: the fewest that keep the GPU at least 85 % as busy as the best number does.

    >>> _splits(blocks=48, slots=108, key_blocks=16)
    2
    """
    if blocks >= 0.8 * slots:
        return 1
    possible = [
        n for n in range(1, min(MOST_SPLITS, slots, key_blocks) + 1)
        if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))
    ]  # fmt: skip
    busy = {n: blocks * n / slots / math.ceil(blocks * n / slots) for n in possible}
    return next((n for n in possible if busy[n] >= 0.85 * max(busy.values())), 1)


def _multiprocessors(tensor: Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def _rounded(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def _rounded_head(elements: int) -> int:
    unit = 32 if elements <= 128 else 64
    return -(-elements // unit) * unit
