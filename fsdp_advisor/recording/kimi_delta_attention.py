"""The allocations of flash-linear-attention 0.6's Kimi delta attention (KDA), for recording on a machine without a GPU.

It is a gated delta rule with a decay for each element of a key. It runs in chunks of C = 64 tokens, and blocks of 16. B = micro-batch,
T = tokens, N = ceil(T / C) chunks, H = heads of queries and keys, J = heads of values, K = width of a key, V = width of a value.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.causal_conv1d import empty, kernel
from fsdp_advisor.recording.linear_attention import CHUNK, Size, cumulative, gradient_of_normalized, normalized

BLOCK = 16
"""Rows of the blocks on the diagonal of a chunk's matrix, which are in fp32. Source: fla/ops/kda/chunk_intra.py, `chunk_kda_fwd_intra`."""
KEY_TILE = 32
"""Width of the tiles of keys, each with its own partial gradient of beta. Source: the same file, `chunk_kda_bwd_intra`."""


def chunk_kda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output (B, T, J, V), and the last state (B, J, K, V) if `output_final_state`. query, key: (B, T, H, K); value: (B, T, J, V); g:
    (B, T, J, K); beta: (B, T, J).

    Queries and keys are normalized inside and the decay is computed outside, as all models request. In training the state before the
    first token is empty.
    """
    result: tuple[torch.Tensor, torch.Tensor | None] = _ChunkKda.apply(  # type: ignore[no-untyped-call]  # torch's
        query, key, value, g, beta, output_final_state
    )
    return result


class _ChunkKda(torch.autograd.Function):
    """The allocations of `ChunkKDAFunction` (fla/ops/kda/chunk.py) and of the functions that it calls."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        output_final_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = [x.contiguous() for x in (q, k, v, g, beta)]  # copies that live until the end of forward
        q, q_norm = normalized(given[0])
        k, k_norm = normalized(given[1])
        v, g_given, beta = given[2:]
        out, final_state, g, query_scores, solved = _forward(q, k, v, g_given, beta, output_final_state)
        ctx.save_for_backward(q, q_norm, k, k_norm, v, g, g_given, beta, query_scores, solved)
        return out.type_as(q), final_state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [x.contiguous() for x in grads if x is not None]
        q, q_norm, k, k_norm, v, g, g_given, beta, query_scores, solved = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = _gradients(given[0], q, k, v, g, beta, query_scores, solved)
        dq = gradient_of_normalized(q, q_norm, dq)
        dk = gradient_of_normalized(k, k_norm, dk)
        return dq.to(q), dk.to(k), dv.to(v), dg.to(g_given), dbeta.to(beta), None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`chunk_kda_fwd`: the output, the last state, the sums of the decay, and the chunks' two matrices."""
    g = cumulative(g)
    size = Size(k, v)
    query_scores, solved, w, u, decayed = _chunk_matrices(q, k, v, g, beta, size)
    states = empty((size.b, size.chunks, size.j, size.k, size.v), k)
    final_state = torch.zeros((size.b, size.j, size.k, size.v)) if output_final_state else None
    new_v = empty(u.shape, u)
    kernel([decayed, w, u, g], size.flops(key_by_value=2))
    out = torch.zeros_like(new_v)
    kernel([q, new_v, g, query_scores, states], size.flops(key_by_value=1, chunk_by_value=1))
    return out, final_state, g, query_scores, solved


def _chunk_matrices(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, size: Size
) -> tuple[torch.Tensor, ...]:
    """`chunk_kda_fwd_intra`: the products of queries and keys in a chunk, the solved system, w, u and the decayed keys.

    Of a chunk's 16 blocks 6 are below the diagonal, each a product for queries and one for keys.
    """
    scores = (*v.shape[:3], CHUNK)
    query_scores, solved = empty(scores, k), torch.zeros(scores, dtype=k.dtype)
    diagonal = torch.empty((*v.shape[:3], BLOCK))
    kernel([q, k, g, beta], 0)
    kernel([q, k, g, beta, diagonal], size.flops(chunk_by_key=3) // 4)
    w, u, decayed = empty(g.shape, k), empty(v.shape, v), empty(g.shape, k)
    kernel([k, v, beta, solved, g], size.flops(chunk_by_key=1, chunk_by_value=1))
    return query_scores, solved, w, u, decayed


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    query_scores: torch.Tensor,
    solved: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`chunk_kda_bwd`: the gradients of q, k (both normalized), v, g and beta."""
    size = Size(k, v)
    w, u, decayed_q, decayed_k = empty(g.shape, k), empty(v.shape, v), empty(g.shape, k), empty(g.shape, k)
    kernel([q, k, v, beta, solved, g], size.flops(chunk_by_key=1, chunk_by_value=1))
    states = empty((size.b, size.chunks, size.j, size.k, size.v), decayed_k)
    new_v = empty(u.shape, u)
    kernel([decayed_k, w, u, g], size.flops(key_by_value=2))
    dquery_scores = torch.empty((*v.shape[:3], CHUNK))
    dv = empty(grad.shape, grad)
    kernel([query_scores, new_v, grad], size.flops(chunk_by_value=2))
    dstates = empty(states.shape, decayed_q)
    dv_of_states = empty(dv.shape, dv)
    kernel([decayed_q, decayed_k, w, g, grad, dv], size.flops(key_by_value=3))
    dv = dv_of_states
    del dv_of_states
    dq, dk, dv, dg, dbeta, dsolved = _gradients_of_chunks(
        [q, k, v, new_v, g, beta, solved, states, grad, dstates, dv], v, g, beta, solved, size
    )
    dq, dk, dg, dbeta = _gradients_in_blocks(
        [q, k, g, beta, dquery_scores, dsolved, dq, dk, dg], dq, dk, dg, dbeta, size
    )
    if size.h != size.j:
        per_key_head = (size.b, size.t, size.h, size.j // size.h, size.k)
        dq = dq.view(per_key_head).sum(3)
        dk = dk.view(per_key_head).sum(3)
    return dq, dk, dv, cumulative(dg), dbeta


def _gradients_of_chunks(
    reads: list[torch.Tensor],
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    size: Size,
) -> tuple[torch.Tensor, ...]:
    """`chunk_kda_bwd_wy_dqkg_fused`: the gradients of q, k, v, g, beta and the solved system."""
    dq, dk = torch.empty(g.shape), torch.empty(g.shape)
    dv = empty(v.shape, v)
    dg, dbeta, dsolved = torch.empty(g.shape), torch.empty(beta.shape), torch.empty(solved.shape)
    kernel(reads, size.flops(key_by_value=3, chunk_by_key=2, chunk_by_value=2, chunk_by_chunk=2))
    return dq, dk, dv, dg, dbeta, dsolved


def _gradients_in_blocks(
    reads: list[torch.Tensor],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dg: torch.Tensor,
    dbeta: torch.Tensor,
    size: Size,
) -> tuple[torch.Tensor, ...]:
    """`chunk_kda_bwd_intra`: the gradients with those of the chunks' two matrices. Each of the 6 blocks below the diagonal has four
    products.
    """
    of_q, of_k = torch.empty_like(dq), torch.empty_like(dk)
    of_beta = torch.empty((-(-size.k // KEY_TILE), *dbeta.shape))
    of_g = torch.empty_like(dg)
    kernel(reads, size.flops(chunk_by_key=3) // 2)
    return of_q, of_k, of_g, of_beta.sum(0).add_(dbeta)
