"""Run attention, norms and other code of a step as on a GPU, for recording on a machine without one. Dropout and autocast are in `cuda`.

Under fake tensors on a CPU, transformers cannot check that no sequences are packed, so it makes a mask and repeats the key and
value heads, and PyTorch selects the CPU's kernel. On CUDA there is no mask, unless a sliding window is filled or the model's code
always makes one. There PyTorch 2.13 selects the first that applies (ATen/native/transformers/cuda/sdp_utils.cpp):

- cuDNN's kernel: half precision on Hopper and Blackwell, without dropout and without a mask that requires a gradient;
- the flash kernel: half precision without a mask;
- the memory-efficient kernel: queries have as many heads as keys, and a head's size is a multiple of 16 bytes;
- no kernel: `_scaled_dot_product_attention_math` (ATen/native/transformers/attention.cpp) computes the whole score matrix. In
  fp32 this applies to every model with grouped queries: without a mask transformers passes `enable_gqa` (integrations/
  sdpa_attention.py, `use_gqa_in_sdpa`), which the memory-efficient kernel does not support (its `supports_gqa` is false;
  PyTorch's main branch added support after 2.13, in pull request 191085).

Each call converts a boolean mask to floats, which are kept for backward. Not modelled: the padding of T to multiples of 16 or
32, and the flash kernel's forward scratch if few heads and rows leave multiprocessors idle.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import masking_utils

from fsdp_advisor.recording import quantized
from fsdp_advisor.recording.cuda import as_on_cuda
from fsdp_advisor.recording.fake_operators import fake_operator
from fsdp_advisor.recording.flash import cudnn, flash, scratch
from fsdp_advisor.recording.masked_scatter import masked_scatter
from fsdp_advisor.recording.values import unread

HEAD_BYTES = 16
"""The size of a head's row must be a multiple of this. Source: sdp_utils.cpp, minimum_gemm_alignment."""
FLASH_HEAD = 256
"""The largest head of the flash and cuDNN kernels. Source: sdp_utils.cpp, check_head_dim_size_flash,
check_cudnn_tensor_shapes.
"""

_find_packed_sequence_indices = masking_utils.find_packed_sequence_indices


@contextlib.contextmanager
def as_on_gpu(*, by_cudnn: bool = False, packed: bool = False) -> Iterator[None]:
    """Context in which attention, rms_norm, dropout, autocast and the search for packed sequences run as on a GPU.

    `by_cudnn`: whether sdpa prefers cuDNN's kernel. `packed`: whether the search finds packed sequences.
    """
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention_by_cudnn if by_cudnn else attention),
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(torch.Tensor, "masked_scatter", masked_scatter),
        as_on_cuda(),
        quantized.as_on_cuda(),
        mock.patch.object(
            masking_utils, "find_packed_sequence_indices", _packed_sequences if packed else _no_packed_sequences
        ),
    ):
        yield


def autocast_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inputs of scaled dot product attention as autocast casts them: all but a boolean mask. Unchanged without autocast.

    The last input is cast first: the casts are arguments of one call (aten/src/ATen/autocast_mode.h, `WrapFunction_`), which GCC, the
    compiler of PyTorch's builds for Linux, evaluates from last to first.
    """
    if not torch.is_autocast_enabled("cpu"):
        return query, key, value, attn_mask
    half = torch.get_autocast_dtype("cpu")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(half)
    value, key, query = value.to(half), key.to(half), query.to(half)
    return query, key, value, attn_mask


def kernel_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    *,
    enable_gqa: bool,
    by_cudnn: bool,
) -> Literal["cudnn", "flash", "efficient", "math"]:
    """The kernel that scaled dot product attention runs on CUDA. cuDNN and flash support grouped heads only if `enable_gqa` is passed."""
    known = enable_gqa or query.shape[-3] == key.shape[-3] == value.shape[-3]
    if by_cudnn and known and cudnn_takes(query, key, value, attn_mask, dropout_p):
        return "cudnn"
    if known and flash_takes(query, key, value, attn_mask):
        return "flash"
    return "efficient" if efficient_takes(query, key, value, attn_mask) else "math"


def attention(
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
    """`torch.nn.functional.scaled_dot_product_attention` as on CUDA. q, k, v have shape (B, H, T, D)."""
    query, key, value, attn_mask = autocast_inputs(query, key, value, attn_mask)
    with torch.autocast("cpu", enabled=False):
        kernel = kernel_of(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, by_cudnn=by_cudnn)
        if kernel == "flash":
            return flash(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
        bias = additive(attn_mask, query.dtype) if attn_mask is not None else None
        if kernel == "cudnn":
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return cudnn(q, k, v, bias).transpose(1, 2)
        if kernel == "math":
            return _math(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])
        out: torch.Tensor = _EfficientAttention.apply(query, key, value, bias)  # type: ignore[no-untyped-call]  # torch's
        return out


attention_by_cudnn = functools.partial(attention, by_cudnn=True)
"""`attention` as on Hopper and Blackwell."""


def _no_packed_sequences(position_ids: torch.Tensor) -> None:
    """transformers' check for packed sequences as on a GPU: allocate and free its tensors, and find none."""
    _packed_sequences(position_ids)


def _packed_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """transformers' check for packed sequences if it finds some. Under fake tensors transformers itself skips the part that reads
    values.
    """
    mask: torch.Tensor | None = _find_packed_sequence_indices(position_ids)
    if mask is not None:
        (mask[:, -1] == 0).all()
    return mask


def cudnn_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float
) -> bool:
    """Whether cuDNN's kernel applies on compute capability 9.0; on 10.0 heads are at most 128.

    Source: `check_prefer_cudnn_attention`, `can_use_cudnn_attention`.
    """
    return (
        dropout_p == 0
        and query.dtype != torch.float32
        and query.dim() == key.dim() == value.dim() == 4
        and all(x.shape[3] <= FLASH_HEAD and x.shape[3] % 8 == 0 for x in (query, value))
        and not (attn_mask is not None and attn_mask.requires_grad)
    )


def flash_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    """Whether the flash kernel applies on compute capability 8.0 and later. Source: `can_use_flash_attention`."""
    return (
        attn_mask is None
        and query.dtype != torch.float32
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[3] == key.shape[3] == value.shape[3] <= FLASH_HEAD
    )


def efficient_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> bool:
    """Whether the memory-efficient kernel applies on compute capability 8.0 and later. Source: `can_use_mem_efficient_attention`."""
    multiple = HEAD_BYTES // query.element_size()
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[3] == key.shape[3]
        and query.shape[3] % multiple == value.shape[3] % multiple == 0
        and all(x.stride(-1) == 1 for x in (query, key, value, attn_mask) if x is not None)
    )


def additive(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as a tensor that is added to the scores. Source: attention.cpp, `convert_boolean_attn_mask`."""
    if attn_mask.dtype != torch.bool:
        return attn_mask
    with unread():
        return torch.where(attn_mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype))


# The composite


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`_scaled_dot_product_attention_math`. PyTorch's own cannot be recorded, because under a dispatch mode it does not add the
    mask in place.
    """
    dtype = query.dtype
    full = [x.float() for x in (query, key, value)]
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = full[0] * root, full[1], full[2]
    if is_causal:
        bias = additive(torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(), query.dtype)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if bias is not None:
        scores.add_(bias)
    scores = _SafeSoftmax.apply(scores)  # type: ignore[no-untyped-call]  # torch's
    if dropout_p > 0:
        scores = F.dropout(scores, dropout_p)
    also = scores.to(dtype)  # the operator's second result
    out = torch.matmul(scores, value)
    result = out.to(dtype)
    del full, out, also
    return result


class _SafeSoftmax(torch.autograd.Function):
    """`aten::_safe_softmax` over the last dimension, with its temporary tensors, which a dispatch mode does not see."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        out = torch.softmax(scores, -1)
        masked = scores.isneginf()
        out.masked_fill_(masked.all(-1, keepdim=True), 0.0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], out, -1, out.dtype)


# The fused norm


def rms_norm(
    tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` as on CUDA, where one kernel computes it. Elsewhere it is a composite of other operators.

    Source: ATen/native/layer_norm.cpp, rms_norm_symint, and cuda/layer_norm_kernel.cu (torch 2.13).
    """
    if weight is None or tensor.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return composite_rms_norm(tensor, normalized_shape, weight, eps)
    out: torch.Tensor = _FusedRmsNorm.apply(tensor, weight)  # type: ignore[no-untyped-call]  # torch's
    return out


composite_rms_norm = F.rms_norm


@fake_operator("rms_norm")
def _rms_norm_forward(tensor: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.new_empty(tensor.shape), tensor.new_empty((*tensor.shape[:-1], 1), dtype=torch.float32)


@fake_operator("rms_norm_backward")
def _rms_norm_backward(
    grad: torch.Tensor, tensor: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.new_empty(tensor.shape), torch.empty_like(weight)


class _FusedRmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm`: saves its inputs, and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        tensor = tensor.contiguous()
        out, scale = _rms_norm_forward(tensor, weight)
        ctx.save_for_backward(tensor, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensor, scale, weight = ctx.saved_tensors
        gradients: tuple[torch.Tensor, torch.Tensor] = _rms_norm_backward(grads[0].contiguous(), tensor, scale, weight)
        return gradients


# The memory-efficient kernel


@fake_operator("efficient_attention")
def efficient_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shape (B, H, T, D), and the logarithm of the softmax's sums, (B, H, T) in fp32. Only for fake tensors."""
    b, h, t, _ = q.shape
    return q.new_empty((b, t, h, v.shape[3])).transpose(1, 2), q.new_empty((b, h, t), dtype=torch.float32)


@fake_operator("efficient_attention_backward")
def efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of q, k, v and, if there is one, the bias. Only for fake tensors."""
    grads = [x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v)]
    return grads if bias is None else [*grads, bias.new_empty(bias.shape)]


class _EfficientAttention(torch.autograd.Function):
    """`aten::_scaled_dot_product_efficient_attention`: saves q, k, v, the bias, the output and one fp32 log-sum-exp per row and head.

    Backward allocates dq, dk, dv, and the bias's gradient if it is required. Its scratch is delta (B, H, T), in fp32 also the
    whole product of output and gradient, and a workspace: an fp32 accumulator of dq in tiles of `_dq_columns`. Not counted: the
    counters (16 bytes per tile), and the additional dk and dv of heads larger than 128 in half precision (at most 25 MiB while
    B H <= 200). The random seeds of dropout are on the host. Source: torch/_meta_registrations.py;
    ATen/native/transformers/cuda/attention.cu, attention_backward.cu; mem_eff_attention/kernel_backward.h, workspace_size.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor
        out, lse = efficient_forward(q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, bias, out, lse = ctx.saved_tensors
        asked = bias if ctx.needs_input_grad[3] else None
        grad = grads[0].transpose(1, 2).contiguous()
        dq, dk, dv, *db = efficient_backward(grad, q, k, v, asked, out, lse)
        with scratch():
            taken = efficient_scratch(q, grad, out.transpose(1, 2))
        del taken
        return dq, dk, dv, db[0] if db else None


def efficient_scratch(q: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    """The scratch of the memory-efficient kernel's backward. q has shape (B, H, T, D), the gradient and the output (B, T, H, D)."""
    b, h, t, d = q.shape
    if q.dtype == torch.float32:
        delta = (grad * out).sum(-1).transpose(1, 2).contiguous()
    else:
        delta = q.new_empty((b, h, t), dtype=torch.float32)
    columns = _dq_columns(d, q.dtype)
    return [delta, q.new_empty((b, h, t, -(-d // columns) * columns), dtype=torch.float32)]


def _dq_columns(head: int, dtype: torch.dtype) -> int:
    """The kernel's kBlockSizeJ (columns of an accumulator tile) on A100 and later. Source: mem_eff_attention/kernels/cutlassB.h,
    dispatch_cutlassB_*_sm80.
    """
    return 128 if dtype != torch.float32 and 64 < head <= 128 else 64
