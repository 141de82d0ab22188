"""A stand-in for causal-conv1d 1.7, whose CUDA extension cannot be built without CUDA. It makes the same allocations.

Source: causal_conv1d_interface.py; cpp_functions.py; csrc/causal_conv1d.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function

causal_conv1d_update = None  # for generation


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if 1 not in x.stride()[1:]:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return causal_conv1d_fwd_function(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return causal_conv1d_bwd_function(*ctx.saved_tensors, grads[0])[:3]


def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    result: torch.Tensor = CausalConv1d.apply(x, weight, bias)
    return result
