"""The allocations of Liger's kernel for the routed experts of a layer.

N = tokens, K = experts of a token, E = experts, H = width of a token, I = width of an expert. Tokens are assumed to be distributed evenly
over the experts, which affects only the number of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_advisor.recording.fused_kernels import empty, kernel

TILE_TOKENS = 64
"""Tokens of a tile. Source: liger-kernel 0.8.5, ops/fused_moe.py, BLOCK_M_TOKEN."""
ROUTED_AT_ONCE = 1024
"""(token, expert) pairs that one thread block routes. Source: the same file, `compute_routing_metadata`."""


def experts(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward that replaces the forward of a module of routed experts. Source: liger-kernel 0.8.5, transformers/swiglu.py,
    `LigerExperts`.
    """
    x = hidden_states.view(-1, hidden_states.shape[-1])
    chosen = top_k_index.view(-1, top_k_index.shape[-1]).to(torch.int32)
    weights = top_k_weights.view(-1, top_k_weights.shape[-1])
    out: torch.Tensor = _Experts.apply(x, self.gate_up_proj, self.down_proj, chosen, weights)  # type: ignore[no-untyped-call]  # torch's
    return out.view(hidden_states.shape)


class _Experts(torch.autograd.Function):
    """The allocations of `LigerFusedMoEFunction` (ops/fused_moe.py). Backward computes gradients of the weights even if they are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        x, gate_up, down, chosen, weights = (t.contiguous() for t in (x, gate_up, down, chosen, weights))
        tokens, width = x.shape
        pairs, inner = chosen.numel(), down.shape[2]
        counts, *routing = _routing(chosen, gate_up.shape[0])
        before = empty((pairs, 2 * inner), x)
        after = empty((pairs, inner), x)
        kernel([], [], 2 * pairs * width * 2 * inner)
        each = empty((pairs, width), x)
        kernel([], [], 2 * pairs * inner * width)
        flat = weights.flatten().contiguous()
        out = empty((tokens, width), x)
        kernel([each, flat], [out])
        ctx.save_for_backward(x, gate_up, down, before, flat, *routing)
        ctx.shape = weights.shape
        del counts, after
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, down, before, *_ = ctx.saved_tensors
        grad = grads[0].contiguous()
        pairs, inner, width = before.shape[0], down.shape[2], x.shape[1]
        for_before = empty(before.shape, grad)
        weighted = empty((pairs, inner), grad)
        for_weights = torch.zeros(pairs, dtype=grad.dtype)
        kernel([before], [for_before, weighted], 2 * pairs * width * inner)
        for_down = torch.zeros_like(down)
        kernel([], [], 2 * pairs * inner * width)
        for_each = empty((pairs, width), grad)
        kernel([], [], 2 * pairs * 2 * inner * width)
        for_x = torch.zeros(x.shape, dtype=grad.dtype)
        kernel([for_each], [for_x])
        for_gate_up = torch.zeros_like(gate_up)
        kernel([], [], 2 * pairs * width * 2 * inner)
        return for_x, for_gate_up, for_down, None, for_weights.view(ctx.shape)


def _routing(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """The number of tokens of each expert, then the tensors that are saved for backward: the first row of each expert, three permutations,
    and the start and the expert of each tile.

    Source: `compute_routing_metadata`.
    """
    tokens, of_token = chosen.shape
    pairs = tokens * of_token
    blocks = -(-tokens // max(1, ROUTED_AT_ONCE // (1 << (of_token - 1).bit_length())))
    partial = empty((experts, blocks), chosen)
    kernel([chosen], [partial])
    counts = partial.sum(dim=1, dtype=torch.int32)
    starts, offsets = empty((experts + 1,), chosen), empty((experts + 1,), chosen)
    kernel([counts, partial], [starts, offsets, partial])
    tiles = experts * -(-pairs // (experts * TILE_TOKENS))
    tile_starts, tile_experts = empty((tiles,), chosen), empty((tiles,), chosen)
    scattered, back, gathered = (empty((pairs,), chosen) for _ in range(3))
    kernel([chosen, partial], [scattered, back, gathered, tile_starts, tile_experts])
    return counts, starts, gathered, scattered, back, tile_starts, tile_experts
