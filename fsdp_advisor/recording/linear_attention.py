"""The allocations of flash-linear-attention 0.6 and causal-conv1d 1.7, for recording on a machine without a GPU.

transformers calls their functions if the packages are installed (integrations/hub_kernels.py,
`use_kernel_func_from_hub_with_fallback`), else functions in PyTorch, which keep several times as much for backward. The classes below
allocate, save and free what the packages' autograd functions do, in their order; kernels are left out but for their work.

The gated delta rule runs in chunks of C = 64 tokens. B = micro-batch, T = tokens, N = ceil(T / C) chunks, H = heads of queries and keys,
J = heads of values, K = width of a key, V = width of a value.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.model.kernels import GATED_DELTA_RULE

CHUNK = 64
KEY_TILE = 128
"""The widest tile of keys in backward, on GPUs with the shared memory of an A100 or H100 and in half precision. Others have 32 or
64, and one more fp32 per token and head for each further tile. Source: fla/ops/common/chunk_o.py, `chunk_bwd_dqkwg`."""


@contextlib.contextmanager
def with_kernels(model: nn.Module) -> Iterator[None]:
    """Context in which the model's code finds the packages' functions."""
    ours = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule, "causal_conv1d_fn": causal_conv1d}
    places = {f"transformers.models.{name}.modeling_{name}" for name in GATED_DELTA_RULE}
    with contextlib.ExitStack() as patches:
        for place in places & {type(module).__module__ for module in model.modules()}:
            code = sys.modules[place]
            for name, function in ours.items():
                if hasattr(code, name):
                    patches.enter_context(mock.patch.object(code, name, function))
        yield


@torch.library.custom_op("fsdp_advisor::linear_attention_kernel", mutates_args=())
def _kernel(reads: list[torch.Tensor], flops: int) -> None:
    """Record a fused kernel's reads and FLOPs. Its outputs count where the caller allocates them."""
    raise NotImplementedError("only its work is known")


@_kernel.register_fake
def _(reads: list[torch.Tensor], flops: int) -> None:
    return None


# The gated delta rule


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
    """The output (B, T, J, V), and the last state (B, J, K, V) if asked for. query, key: (B, T, H, K); value: (B, T, J, V); g and beta:
    (B, T, J).

    Queries and keys are normalized inside, as all models request. In training the state before the first token is empty.
    """
    result: tuple[torch.Tensor, torch.Tensor | None] = _ChunkGatedDeltaRule.apply(  # type: ignore[no-untyped-call]  # torch's
        query, key, value, g, beta, output_final_state
    )
    return result


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Source: fla/ops/gated_delta_rule/chunk.py, `ChunkGatedDeltaRuleFunction`, and what it calls."""

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
        q, q_norm = _normalized(given[0])
        k, k_norm = _normalized(given[1])
        v, beta = given[2], given[4]
        g = _cumulative(given[3])
        size = _Size(k, v)
        solved = torch.zeros((*g.shape, CHUNK), dtype=k.dtype)
        _kernel([k, g, beta], size.flops(chunk_by_key=1))
        w, u = _w_and_u(k, v, g, beta, solved, size)
        states = _empty((size.b, size.chunks, size.j, size.k, size.v), k)
        final_state = torch.zeros((size.b, size.j, size.k, size.v)) if output_final_state else None
        new_v = _empty(u.shape, u)
        _kernel([k, w, u, g], size.flops(key_by_value=2))
        out = _empty(new_v.shape, new_v)
        _kernel([q, k, new_v, states, g], size.flops(key_by_value=1, chunk_by_key=1, chunk_by_value=1))
        ctx.save_for_backward(q, q_norm, k, k_norm, v, g, beta, solved)
        ctx.autocasts = torch.is_autocast_enabled("cpu")
        return out, final_state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [x.contiguous() for x in grads if x is not None]
        q, q_norm, k, k_norm, v, g, beta, solved = ctx.saved_tensors
        with torch.autocast("cpu", enabled=ctx.autocasts):  # it changes the dtype of sums
            dq, dk, dv, dg, dbeta = _gradients(given[0], q, k, v, g, beta, solved)
        dq = _gradient_of_normalized(q, q_norm, dq)
        dk = _gradient_of_normalized(k, k_norm, dk)
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
    size = _Size(k, v)
    per_key_head = (size.b, size.t, size.h, size.j // size.h, size.k)
    w, u = _w_and_u(k, v, g, beta, solved, size)
    states = _empty((size.b, size.chunks, size.j, size.k, size.v), k)
    new_v = _empty(u.shape, u)
    _kernel([k, w, u, g], size.flops(key_by_value=2))
    dv = _empty(grad.shape, grad)
    _kernel([q, k, g, grad], size.flops(chunk_by_key=1, chunk_by_value=1))
    dstates = _empty(states.shape, q)
    dv_of_states = _empty(dv.shape, dv)
    _kernel([q, k, w, g, grad, dv], size.flops(key_by_value=3))
    dv = dv_of_states
    del dv_of_states
    dq, dk = _empty((*v.shape[:3], size.k), q), _empty((*v.shape[:3], size.k), k)
    dg = torch.empty((-(-size.k // KEY_TILE), *g.shape))
    dw = _empty(w.shape, w)
    _kernel(
        [q, k, new_v, w, g, states, dv, grad, dstates], size.flops(key_by_value=3, chunk_by_key=2, chunk_by_value=1)
    )
    if size.h != size.j:
        dq = dq.view(per_key_head).sum(3)
        dk = dk.view(per_key_head).sum(3)
    dg = dg.sum(0)
    dk_of_w = _empty((*v.shape[:3], size.k), k)
    dvalue = _empty(v.shape, v)
    dg_of_w, dbeta = _empty(g.shape, g), _empty(beta.shape, beta)
    _kernel([k, v, beta, g, solved, dw, dv], size.flops(chunk_by_key=5, chunk_by_value=2, chunk_by_chunk=2))
    if size.h != size.j:
        dk_of_w = dk_of_w.view(per_key_head).sum(3)
    del dv
    dk.add_(dk_of_w)
    dg.add_(dg_of_w)
    return dq, dk, dvalue, _cumulative(dg), dbeta


class _Size:
    """The dimensions of keys (B, T, H, K) and values (B, T, J, V)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.b, self.t, self.h, self.k = keys.shape
        self.j, self.v = values.shape[2:]
        self.chunks = -(-self.t // CHUNK)

    def flops(
        self, *, key_by_value: int = 0, chunk_by_key: int = 0, chunk_by_value: int = 0, chunk_by_chunk: int = 0
    ) -> int:
        """FLOPs of this many matrix products of each kind over all tokens and heads: per token and head 2 K V, 2 C K, 2
        C V and 2 C C. They are the calls of `tl.dot` in the kernels; masked halves of a chunk's matrix count too.
        """
        c, k, v = CHUNK, self.k, self.v
        per_token = key_by_value * k * v + chunk_by_key * c * k + chunk_by_value * c * v + chunk_by_chunk * c * c
        return 2 * self.b * self.j * self.chunks * c * per_token


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype)


def _normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`l2norm_fwd`: rows divided by their norm, and one fp32 per row."""
    found = _empty(x.shape, x), torch.empty(x.shape[:-1])
    _kernel([x], 0)
    return found


def _gradient_of_normalized(y: torch.Tensor, norm: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """`l2norm_bwd`."""
    found = _empty(y.shape, y)
    _kernel([y, norm, dy], 0)
    return found


def _cumulative(g: torch.Tensor) -> torch.Tensor:
    """`chunk_local_cumsum`, in fp32."""
    found = torch.empty(g.shape)
    _kernel([g], 0)
    return found


def _w_and_u(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, solved: torch.Tensor, size: _Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recompute_w_u_fwd`: w (B, T, J, K) and u (B, T, J, V)."""
    found = _empty((*v.shape[:3], size.k), k), _empty(v.shape, v)
    _kernel([k, v, beta, solved, g], size.flops(chunk_by_key=1, chunk_by_value=1))
    return found


# The causal convolution


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """The output, of the input's shape (B, channels, T) and layout. weight: (channels, width)."""
    out: torch.Tensor = _CausalConv1d.apply(hidden_states, weight, bias)  # type: ignore[no-untyped-call]  # torch's
    return out


class _CausalConv1d(torch.autograd.Function):
    """Source: causal-conv1d 1.7, causal_conv1d_interface.py, cpp_functions.py and csrc/causal_conv1d.cpp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        bias = bias.contiguous() if bias is not None else None
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        (grad,) = grads
        if grad.stride(2) != 1 and grad.stride(1) != 1:
            grad = grad.contiguous()
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        # the kernel wants a gradient with the input's layout
        if x.stride(1) == 1 and x.stride(2) > 1:
            grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            grad = grad.contiguous()
        _kernel([x, grad], 0)
        del grad
        return dx, dweight.type_as(weight), dbias.type_as(bias) if dbias is not None else None
