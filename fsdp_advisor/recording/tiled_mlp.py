"""Feed-forward networks that run in shards of the sequence, one after the other, and again in backward.

Source: liger-kernel 0.8.5, ops/tiled_mlp.py, `LigerTiledMLPFunction`; deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py,
`TiledMLP`; axolotl 0.19.0, monkeypatch/tiled_mlp/base.py, `TiledMLP`. Local variables live as long as in these sources, and so do their
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.source import LayerStack

AXOLOTL_SHARD = 32_768
"""Tokens of a shard of axolotl, if the number of shards is not given. Source: monkeypatch/tiled_mlp/patch.py, `_build_tiled_forward`."""


def tile_mlps(stacks: Iterable[LayerStack], tiling: str, name: str) -> None:
    """Run the feed-forward network of each layer in shards.

    `tiling`: the implementation and the number of shards (`TapeKey.tiled_mlp`). Raises NotRecordable if the model has no network that can
    be tiled: these libraries tile only the networks of dense decoders.
    """
    code, shards = tiling.split(":")
    found = list(stacks)
    networks = [getattr(layer, "mlp", None) for stack in found for layer in stack.layers]
    if len(found) != 1 or any(not isinstance(each, nn.Module) or hasattr(each, "experts") for each in networks):
        raise NotRecordable(
            f"{name}: a tiled MLP is modelled for dense decoders whose layers have a module mlp",
            hint="leave --tiled-mlp out",
        )
    for network in networks:
        assert isinstance(network, nn.Module)
        network.forward = partial(_in_shards, network.forward, network, code, shards)


def gradients_wait() -> bool:
    """Whether the gradients of a tiled MLP are complete only after a later shard, for which DeepSpeed's engine waits."""
    return _Progress.waits


class _Progress:
    waits = False


def _in_shards(
    forward: Callable[[torch.Tensor], torch.Tensor], network: nn.Module, code: str, shards: str, x: torch.Tensor
) -> torch.Tensor:
    """The network's `forward` of `x`, shape (B, T, D), in shards of the sequence."""
    trained = [p for p in network.parameters() if p.requires_grad]
    tokens, hidden = x.shape[-2:]
    count = max(1, ceil(tokens / (AXOLOTL_SHARD if code == "axolotl" else hidden))) if shards == "auto" else int(shards)
    tiled = _SummedByHand if code == "axolotl" else _Tiled
    out: torch.Tensor = tiled.apply(x, forward, trained, count, code == "deepspeed")  # type: ignore[no-untyped-call]  # torch's
    return out


class _Tiled(torch.autograd.Function):
    """Liger's and DeepSpeed's implementation. Autograd adds each shard's gradients to those of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        trained: list[nn.Parameter],
        count: int,
        waits: bool,
    ) -> torch.Tensor:
        ctx.forward, ctx.trained, ctx.count, ctx.waits = forward, trained, count, waits
        ctx.save_for_backward(x)
        shards = list(torch.chunk(x, count, dim=-2))
        with torch.no_grad():
            outputs = [forward(shard) for shard in shards]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, learns = _detached(ctx)
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        incoming = grads[0].reshape(-1, shape[-1])
        x_grad = torch.zeros_like(x)
        shards = list(torch.chunk(x, ctx.count, dim=0))
        if ctx.waits and len(shards) != ctx.count:
            raise NotRecordable(
                f"{x.shape[0]:,} tokens give only {len(shards)} shards of a tiled MLP, not {ctx.count}, and DeepSpeed waits for all",
                hint="--tiled-mlp with a number that divides the tokens of a micro-batch",
            )
        try:
            for number, shard in enumerate(shards):
                _Progress.waits = ctx.waits and number + 1 < ctx.count
                for weight in ctx.trained if ctx.waits else ():
                    weight.ds_grad_is_ready = not _Progress.waits
                shard.requires_grad_(learns)
                at, length = number * shards[0].shape[0], shard.shape[0]
                shard.grad = x_grad.narrow(0, at, length).view_as(shard)
                incoming_shard = incoming.narrow(0, at, length).view_as(shard)
                with torch.enable_grad():
                    output = ctx.forward(shard)
                torch.autograd.backward(output, incoming_shard)
        finally:
            _Progress.waits = False
        return x_grad.view(shape), None, None, None, None


class _SummedByHand(_Tiled):
    """axolotl's implementation. It sums the gradients of the shards in buffers with the weights' dtype, which become the weights'
    gradients.
    """

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, learns = _detached(ctx)
        incoming = grads[0]
        x_grad = torch.zeros_like(x)
        shards = list(torch.chunk(x, ctx.count, dim=1))
        before, sums = {}, {}
        for weight in ctx.trained:
            before[weight] = weight.grad
            sums[weight] = torch.zeros_like(weight)
            weight.grad = None
        size = shards[0].numel()
        for number, shard in enumerate(shards):
            shard.requires_grad_(learns)
            shard.grad = x_grad.view(-1).narrow(0, number * size, shard.numel()).view_as(shard)
            incoming_shard = incoming.view(-1).narrow(0, number * size, shard.numel()).view_as(shard)
            with torch.enable_grad():
                output = ctx.forward(shard)
            torch.autograd.backward(output, incoming_shard)
            for weight in ctx.trained:
                if weight.grad is not None:
                    grad = weight.grad.detach()
                    sums[weight].add_(grad)
                    weight.grad = None
        for weight in ctx.trained:
            weight.grad = sums[weight] if before[weight] is None else before[weight] + sums[weight]
        return x_grad, None, None, None, None


def _detached(ctx: Any) -> tuple[torch.Tensor, bool]:
    """The saved input as a leaf, and whether a gradient flows to it."""
    (x,) = ctx.saved_tensors
    learns: bool = x.requires_grad
    x = x.detach()
    x.requires_grad_(learns)
    return x, learns
