"""The allocations of FlashAttention-2 (outputs, saved tensors, scratch), for recording on a machine without the kernel.


q, k, v have shape (B, T, H, D). Forward saves q, k, v, the output and one fp32 log-sum-exp per row and head. Backward allocates
dq, dk, dv. Its scratch is an fp32 accumulator of dq, one fp32 per row, and dk, dv per query head if heads share keys.
Source: Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp, `mha_fwd` and `mha_bwd`.


cuDNN's kernel allocates the same, with three differences: it accepts a mask and saves it, it accepts values of another width,
and its scratch is only the accumulator and the fp32 per row. Source: ATen/native/cudnn/MHA.cpp (torch 2.13) and cudnn-frontend's
`sdpa_backward`. The output has the memory layout of q, and each gradient that of its tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype

NAME = "recorded_fused_attention"  # transformers looks for a kernel package behind any name with "flash" in it
HEAD_ROUNDING = 32


class _Scratch:
    """Whether current allocations are a kernel's scratch, which does not belong to a tensor of the model."""

    active = False


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Context in which allocations count as a kernel's scratch."""
    _Scratch.active = True
    try:
        yield
    finally:
        _Scratch.active = False


def in_scratch() -> bool:
    return _Scratch.active


@torch.library.custom_op("fsdp_advisor::flash_attention", mutates_args=())
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only its shapes are known")


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b, t, h, _ = q.shape
    return torch.empty_like(q[..., : v.shape[3]]), q.new_empty((b, h, t), dtype=torch.float32)


@torch.library.custom_op("fsdp_advisor::flash_attention_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only its shapes are known")


@_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, cudnn: bool
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = _forward(q, k, v)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.scratch = _cudnn_scratch if cudnn else _flash_scratch
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, out, lse = ctx.saved_tensors
        with scratch():
            taken = ctx.scratch(q, k)
        dq, dk, dv = _backward(grads[0].contiguous(), q, k, v, out, lse)
        del taken
        return dq, dk, dv, None, None


def _flash_scratch(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    b, t, h, d = q.shape
    rounded = -(-d // HEAD_ROUNDING) * HEAD_ROUNDING
    taken = [q.new_empty((b, t, h, rounded), dtype=torch.float32), q.new_empty((b, h, t), dtype=torch.float32)]
    if k.shape[2] != h:
        taken += [q.new_empty((b, k.shape[1], h, d)), q.new_empty((b, k.shape[1], h, d))]
    return taken


def _cudnn_scratch(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    b, t, h, d = q.shape
    return [q.new_empty((b, t, h, d + 1), dtype=torch.float32)]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernel's output, of shape (B, T, H, D) like the inputs. Keys and values may have fewer heads."""
    out: torch.Tensor = _FlashAttention.apply(q, k, v, None, False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The output of cuDNN's kernel, of shape (B, T, H, D). `bias` is an additive mask."""
    out: torch.Tensor = _FlashAttention.apply(q, k, v, bias, True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers.integrations.flash_attention.flash_attention_forward with `flash` instead of the kernel."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if v_head_dim != head_dim:
        v = torch.nn.functional.pad(v, [0, head_dim - v_head_dim])
    if (dtype := get_target_dtype(q, module)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = flash(q, k, v)
    return (out if v_head_dim == head_dim else out[..., :v_head_dim]), None


AttentionInterface.register(NAME, _attention)


def _no_mask(*_: Any, **__: Any) -> None:
    """The result of transformers' `flash_attention_mask` without padding. transformers' version reads the values of a mask that
    some models make (OPT in 5.17), which is impossible under fake tensors.
    """


AttentionMaskInterface.register(NAME, _no_mask)
