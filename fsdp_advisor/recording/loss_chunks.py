"""The gradient of the head when the loss is computed in chunks."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_advisor.job.frameworks import TORCHTITAN_CHUNKS


class LossChunks:
    """Sums the gradient of the head over the chunks of a loss. Each chunk has its own backward. FSDP2 sums in fp32.

    Source: torch.distributed.fsdp._fully_shard._fsdp_param (torch 2.13), `to_accumulated_grad_if_needed` and
    `accumulate_unsharded_grad_if_needed`.
    """

    def __init__(self, head: nn.Module) -> None:
        assert isinstance(head.weight, nn.Parameter)
        self.weight = head.weight
        self.shape = tuple(head.weight.shape)
        self.forget()

    def forget(self) -> None:
        self.gradient: torch.Tensor | None = None
        self._count = 0

    def add(self) -> bool:
        """Add the gradient of a chunk. Returns whether it was the last."""
        fresh = self.weight.grad
        assert fresh is not None
        self._count += 1
        if self.gradient is not None:
            self.gradient += fresh
            self.weight.grad = None
        elif fresh.dtype != torch.float32:
            self.gradient = fresh.float()
            self.weight.grad = None
        elif self._count == TORCHTITAN_CHUNKS:
            self.gradient, self.weight.grad = fresh, None
        return self._count == TORCHTITAN_CHUNKS
