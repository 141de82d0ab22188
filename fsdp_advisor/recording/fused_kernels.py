"""Kernels that write to existing tensors, for recordings: `empty` allocates the outputs, `kernel` counts the work."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_advisor.recording.fake_operators import fake_operator


@fake_operator("fused_kernel")
def kernel(reads: list[torch.Tensor], writes: list[torch.Tensor], flops: int = 0) -> None:
    """Count the work of a kernel: the bytes of `reads` and `writes`, and the `flops` of matrix products (whose bytes are not counted)."""


@fake_operator("attention_kernel")
def attention_kernel(queries: torch.Tensor, tokens: int, products: int) -> None:
    """Count the FLOPs of an attention kernel with `products` matrix products, each of `queries` with a matrix of `tokens` tokens."""


@fake_operator("allocation")
def _allocation(like: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor that a kernel fills. Its bytes count as the kernel's work."""
    return like.new_empty(shape, dtype=dtype)


def empty(shape: Iterable[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor of this shape that a kernel fills, with the dtype of `like` unless another is given."""
    found: torch.Tensor = _allocation(like, list(shape), dtype or like.dtype)
    return found
