"""The allocations of causal-conv1d 1.7, for recording on a machine without a GPU, and the work of the packages' kernels."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.fake_operators import fake_operator


@fake_operator("linear_attention_kernel")
def kernel(reads: list[torch.Tensor], flops: int) -> None:
    """Count the work of a kernel: the bytes of `reads`, and `flops`. The bytes that it writes are counted when they are allocated."""


def empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A new tensor of this shape with the dtype of `like`."""
    return torch.empty(shape, dtype=like.dtype)


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
    """The allocations of causal-conv1d's autograd function.

    Source: causal-conv1d 1.7, causal_conv1d_interface.py, cpp_functions.py and csrc/causal_conv1d.cpp.
    """

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
        return gradients_of_causal_conv1d(grads[0], x, weight, bias)


def gradients_of_causal_conv1d(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dx: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of the input, the weight and the bias. The input's is written to `dx` if that is given."""
    if grad.stride(2) != 1 and grad.stride(1) != 1:
        grad = grad.contiguous()
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
    # the kernel needs a gradient with the input's layout
    if x.stride(1) == 1 and x.stride(2) > 1:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        grad = grad.contiguous()
    kernel([x, grad], 0)
    del grad
    return dx, dweight.type_as(weight), dbias.type_as(bias) if dbias is not None and bias is not None else None
