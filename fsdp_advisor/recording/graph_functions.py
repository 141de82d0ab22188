"""Functions of torch.nn.functional that call other operators on a GPU than on a CPU, for the graphs of compiled modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.errors import assert_never
from fsdp_advisor.recording.on_gpu import (
    additive,
    autocast_inputs,
    composite_rms_norm,
    kernel_of,
    rms_norm,
)


@contextlib.contextmanager
def functions_of_graphs(*, by_cudnn: bool) -> Iterator[None]:
    """Context in which sdpa and rms_norm call the operators that they call on a GPU, so that graphs contain these. `by_cudnn`: whether
    sdpa prefers cuDNN's kernel.
    """
    attention = _attention_by_cudnn if by_cudnn else _attention
    with (
        mock.patch.object(nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(nn.functional, "rms_norm", _rms_norm),
    ):
        yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    by_cudnn: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` as the operator that it calls on CUDA, which a graph keeps."""
    query, key, value, attn_mask = autocast_inputs(query, key, value, attn_mask)
    chosen = kernel_of(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, by_cudnn=by_cudnn)
    bias = additive(attn_mask, query.dtype) if attn_mask is not None and chosen in ("cudnn", "efficient") else None
    operators: Any = torch.ops.aten
    found: tuple[torch.Tensor, ...]
    match chosen:
        case "cudnn":
            found = operators._scaled_dot_product_cudnn_attention(
                query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
            )
        case "flash":
            found = operators._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
        case "efficient":
            bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
            found = operators._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )
        case "math":
            found = operators._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        case _:
            assert_never(chosen)
    return found[0]


def _rms_norm(
    tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm`. In a graph it is the operator that it calls on CUDA, which the compiler decomposes."""
    if not torch.compiler.is_compiling():
        return rms_norm(tensor, normalized_shape, weight, eps)
    if weight is None or tensor.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return composite_rms_norm(tensor, normalized_shape, weight, eps)
    out: torch.Tensor = _FusedRmsNorm.apply(tensor, weight, normalized_shape, eps)  # type: ignore[no-untyped-call]  # torch's
    return out


@torch._dynamo.allow_in_graph
class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's operator for rms_norm with its own backward. On a CPU the operator is a composite of others, whose backward keeps more.

    Source: torch 2.13, aten/src/ATen/native/native_functions.yaml, `_fused_rms_norm`; tools/autograd/derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, normalized_shape: list[int], eps: float | None
    ) -> torch.Tensor:
        operators: Any = torch.ops.aten
        out, scale = operators._fused_rms_norm(tensor, normalized_shape, weight, eps)
        ctx.save_for_backward(tensor, weight, scale)
        ctx.normalized_shape = normalized_shape
        return out  # type: ignore[no-any-return]  # torch leaves operators untyped

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operators: Any = torch.ops.aten
        tensor, weight, scale = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:2])
        found = operators._fused_rms_norm_backward(grads[0], tensor, ctx.normalized_shape, scale, weight, needed)
        return (*found, None, None)


def _attention_by_cudnn(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _attention(*args, **kwargs, by_cudnn=True)
