"""The allocations of RWKV-4's kernel (kernels-community/rwkv), for recording on a machine without a GPU.

B = micro-batch, T = tokens, D = width of the attention. transformers calls the kernel if the packages kernels and ninja are installed.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.causal_conv1d import kernel

FORWARD_FLOPS, BACKWARD_FLOPS = 23, 60
"""Floating-point operations per token and channel. Source: rwkv/wkv_cuda.cu, kernel_forward and kernel_backward; each operation on numbers
and each function of them is one.
"""


def wkv(
    time_decay: torch.Tensor, time_first: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """The output (B, T, D) and no state. time_decay, time_first: (D). key, value: (B, T, D).

    Source: transformers 5.23, models/rwkv/modeling_rwkv.py, `rwkv_linear_attention`.
    """
    if key.dtype == torch.bfloat16 and time_first.dtype != key.dtype:
        raise NotRecordable(
            "RWKV's kernel reads keys and time_first in one dtype, and under autocast keys are bfloat16 and time_first is float32",
            hint="--precision bf16, or --backend fsdp2; without the kernels package transformers runs a loop over the tokens in PyTorch",
        )
    out: torch.Tensor = _Wkv.apply(time_decay, time_first, key, value)  # type: ignore[no-untyped-call]  # torch's
    return out, None


class _Wkv(torch.autograd.Function):
    """Source: `RwkvLinearAttention` in the same file."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        time_decay, time_first, key, value = tensors
        ctx.dtype = key.dtype
        time_decay = -torch.exp(time_decay.float().contiguous())
        if key.dtype == torch.float16:
            time_first, key, value = time_first.float(), key.float(), value.float()
        time_first, key, value = time_first.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(key)
        kernel([key, value], FORWARD_FLOPS * key.numel())
        ctx.save_for_backward(time_decay, time_first, key, value, output)
        return output.to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time_decay, time_first, key, value, output = ctx.saved_tensors
        in_half = ctx.dtype == torch.bfloat16
        gradients = [
            torch.empty_like(time_decay, dtype=torch.bfloat16 if in_half else torch.float32),
            *map(torch.empty_like, (time_first, key, value)),
        ]
        grad = grads[0].float() if ctx.dtype == torch.float16 else grads[0]
        kernel([key, value, output, grad.contiguous()], BACKWARD_FLOPS * key.numel())
        return tuple(gradient.to(ctx.dtype) for gradient in gradients)
