"""The allocations of flash-linear-attention 0.6, for recording on a machine without a GPU.

The gated delta rule runs in chunks of C = 64 tokens. B = micro-batch, T = tokens, N = ceil(T / C) chunks, H = heads of queries and keys,
J = heads of values, K = width of a key, V = width of a value.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.causal_conv1d import empty, kernel

CHUNK = 64
KEY_TILE = 128
"""Width of the largest tile of keys in backward, in half precision on GPUs with the shared memory of an A100 or H100. Other GPUs have
32 or 64, and one more fp32 per token and head for each additional tile. Source: fla/ops/common/chunk_o.py, `chunk_bwd_dqkwg`.
"""


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output (B, T, J, V), and the last state (B, J, K, V) if `output_final_state`. query, key: (B, T, H, K); value: (B, T, J, V); g
    and beta: (B, T, J).

    Queries and keys are normalized inside, as all models request. In training the state before the first token is empty.
    """
    result: tuple[torch.Tensor, torch.Tensor | None] = _ChunkGatedDeltaRule.apply(  # type: ignore[no-untyped-call]  # torch's
        query, key, value, g, beta, output_final_state
    )
    return result


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """The allocations of `ChunkGatedDeltaRuleFunction` (fla/ops/gated_delta_rule/chunk.py) and of the functions that it calls."""

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
        v, beta = given[2], given[4]
        g = cumulative(given[3])
        size = Size(k, v)
        solved = torch.zeros((*g.shape, CHUNK), dtype=k.dtype)
        kernel([k, g, beta], size.flops(chunk_by_key=1))
        w, u = _w_and_u(k, v, g, beta, solved, size)
        states = empty((size.b, size.chunks, size.j, size.k, size.v), k)
        final_state = torch.zeros((size.b, size.j, size.k, size.v)) if output_final_state else None
        new_v = empty(u.shape, u)
        kernel([k, w, u, g], size.flops(key_by_value=2))
        out = empty(new_v.shape, new_v)
        kernel([q, k, new_v, states, g], size.flops(key_by_value=1, chunk_by_key=1, chunk_by_value=1))
        ctx.save_for_backward(q, q_norm, k, k_norm, v, g, beta, solved)
        ctx.autocasts = torch.is_autocast_enabled("cpu")
        return out, final_state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [x.contiguous() for x in grads if x is not None]
        q, q_norm, k, k_norm, v, g, beta, solved = ctx.saved_tensors
        with torch.autocast("cpu", enabled=ctx.autocasts):  # autocast changes the dtype of sums
            dq, dk, dv, dg, dbeta = _gradients(given[0], q, k, v, g, beta, solved)
        dq = gradient_of_normalized(q, q_norm, dq)
        dk = gradient_of_normalized(k, k_norm, dk)
        return dq, dk, dv, dg, dbeta, None


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`chunk_gated_delta_rule_bwd`: the gradients of q, k (both normalized), v, g and beta."""
    size = Size(k, v)
    per_key_head = (size.b, size.t, size.h, size.j // size.h, size.k)
    w, u = _w_and_u(k, v, g, beta, solved, size)
    states = empty((size.b, size.chunks, size.j, size.k, size.v), k)
    new_v = empty(u.shape, u)
    kernel([k, w, u, g], size.flops(key_by_value=2))
    dv = empty(grad.shape, grad)
    kernel([q, k, g, grad], size.flops(chunk_by_key=1, chunk_by_value=1))
    dstates = empty(states.shape, q)
    dv_of_states = empty(dv.shape, dv)
    kernel([q, k, w, g, grad, dv], size.flops(key_by_value=3))
    dv = dv_of_states
    del dv_of_states
    dq, dk = empty((*v.shape[:3], size.k), q), empty((*v.shape[:3], size.k), k)
    dg = torch.empty((-(-size.k // KEY_TILE), *g.shape))
    dw = empty(w.shape, w)
    kernel([q, k, new_v, w, g, states, dv, grad, dstates], size.flops(key_by_value=3, chunk_by_key=2, chunk_by_value=1))
    if size.h != size.j:
        dq = dq.view(per_key_head).sum(3)
        dk = dk.view(per_key_head).sum(3)
    dg = dg.sum(0)
    dk_of_w = empty((*v.shape[:3], size.k), k)
    dvalue = empty(v.shape, v)
    dg_of_w, dbeta = empty(g.shape, g), empty(beta.shape, beta)
    kernel([k, v, beta, g, solved, dw, dv], size.flops(chunk_by_key=5, chunk_by_value=2, chunk_by_chunk=2))
    if size.h != size.j:
        dk_of_w = dk_of_w.view(per_key_head).sum(3)
    del dv
    dk.add_(dk_of_w)
    dg.add_(dg_of_w)
    return dq, dk, dvalue, cumulative(dg), dbeta


class Size:
    """The dimensions of keys (B, T, H, K) and values (B, T, J, V)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.b, self.t, self.h, self.k = keys.shape
        self.j, self.v = values.shape[2:]
        self.chunks = -(-self.t // CHUNK)

    def flops(
        self, *, key_by_value: int = 0, chunk_by_key: int = 0, chunk_by_value: int = 0, chunk_by_chunk: int = 0
    ) -> int:
        """FLOPs over all tokens and heads of the given numbers of matrix products of each kind, which have 2 K V, 2 C K, 2 C V and 2 C
        C FLOPs per token and head. The products are the calls of `tl.dot` in the kernels; masked halves of a chunk's matrix count too.
        """
        c, k, v = CHUNK, self.k, self.v
        per_token = key_by_value * k * v + chunk_by_key * c * k + chunk_by_value * c * v + chunk_by_chunk * c * c
        return 2 * self.b * self.j * self.chunks * c * per_token


def normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`l2norm_fwd`: rows divided by their norm, and one fp32 per row."""
    found = empty(x.shape, x), torch.empty(x.shape[:-1])
    kernel([x], 0)
    return found


def gradient_of_normalized(y: torch.Tensor, norm: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """`l2norm_bwd`: the gradient of `normalized`'s input."""
    found = empty(y.shape, y)
    kernel([y, norm, dy], 0)
    return found


def cumulative(g: torch.Tensor) -> torch.Tensor:
    """`chunk_local_cumsum`, in fp32."""
    found = torch.empty(g.shape)
    kernel([g], 0)
    return found


def _w_and_u(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, solved: torch.Tensor, size: Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recompute_w_u_fwd`: w (B, T, J, K) and u (B, T, J, V)."""
    found = empty((*v.shape[:3], size.k), k), empty(v.shape, v)
    kernel([k, v, beta, solved, g], size.flops(chunk_by_key=1, chunk_by_value=1))
    return found
