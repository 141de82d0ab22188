"""Linear layers as DeepSpeed's ZeRO-3 runs them: they save their input for backward, also if their weight is frozen.

PyTorch's own saves the input only for the gradient of the weight. Source: deepspeed 0.19.8, runtime/zero/linear.py,
`LinearFunctionForZeroStage3`, which replaces `torch.nn.functional.linear` (runtime/zero/partition_parameters.py,
`_enable_mem_efficient_linear`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        of_input = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


def saving_inputs() -> AbstractContextManager[object]:
    """Context in which linear layers save their inputs."""
    return mock.patch.object(nn.functional, "linear", _linear)
