"""The functions that call the extension."""

from __future__ import annotations

from typing import Any

import torch

causal_conv1d_update_function = None  # for generation


def causal_conv1d_fwd_function(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """The output. x: (B, channels, T)."""
    assert 1 in x.stride()[1:], "the extension refuses other layouts"
    return torch.empty_like(x)


def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad: torch.Tensor,
    _1: Any = None,
    _2: Any = None,
    _3: Any = None,
    dx: torch.Tensor | None = None,
    *_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of input, weight and bias, and None for the first states. A gradient of another layout is copied, as in C++."""
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    channels_last = x.stride(1) == 1 and x.stride(2) > 1
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else grad.contiguous()
    del grad
    return dx, dweight.type_as(weight), None if dbias is None or bias is None else dbias.type_as(bias), None
