"""Make operators on CPU tensors save the same tensors for backward as on CUDA. A recording runs on fake CPU tensors.

On CUDA dropout keeps a mask of one byte per element; on the CPU it keeps a factor per element in the tensor's dtype.
On CUDA `torch.autocast` runs softmax, normalisation and powers in fp32; on the CPU it runs them in half precision.
Source: aten/src/ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`; aten/src/ATen/autocast_mode.h, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_LOWER_PRECISION_FP (torch 2.13). Seen on GPUs: `tests/memory/published_memory.yaml`, the rows
on BERT.
On the CPU autocast casts the inputs of cross_entropy_loss; on CUDA the log-probabilities stay in half precision.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

from fsdp_advisor.recording.flash import scratch

IN_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp",
)  # fmt: skip
"""Operators whose arguments autocast casts on CUDA but not on the CPU."""
IN_FP32_UNLESS_ASKED = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList")
"""Operators with a dtype argument that autocast on CUDA sets to fp32 if the caller leaves it out."""

IN_HALF = ("einsum",)
"""Operators whose arguments autocast casts to half precision on CUDA but not on the CPU, where it casts those of their products."""

AS_IT_IS = "cross_entropy_loss"
"""The operator whose arguments autocast casts only on the CPU."""

_autocast_is_enabled = torch.is_autocast_enabled
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context in which operators on CPU tensors save the same tensors as on CUDA, and `torch.autocast("cpu")` casts as on
    CUDA. If a model's code asks whether CUDA's autocast is on, it gets the state of the CPU's.
    """
    autograd = torch.library.Library("aten", "IMPL", "AutogradCPU")
    autocast = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        autograd.impl(torch.ops.aten.dropout.default, _dropout)
        for names, kernel in (
            (IN_FP32, _cast),
            (IN_FP32_UNLESS_ASKED, _cast_unless_asked),
            (IN_HALF, _cast_to_half),
        ):
            for name in names:
                operator = operator_named(name)
                autocast.impl(operator, functools.partial(kernel, operator))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the CPU kernel is overridden
            autocast.impl(operator_named(AS_IT_IS), torch.library.fallthrough_kernel)
        with mock.patch.object(torch, "is_autocast_enabled", _is_autocast_enabled):
            yield
    finally:
        autocast._destroy()
        autograd._destroy()


@contextlib.contextmanager
def softmax_scratch() -> Iterator[None]:
    """Context in which softmax's backward allocates the same scratch as on CUDA: the product of gradient and output.

    Scratch is not counted among a step's tensors. Source: aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out.
    """
    autograd = torch.library.Library("aten", "IMPL", "AutogradCPU")
    operator = torch.ops.aten._softmax_backward_data.default

    def backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            with scratch():
                product = grad * output
            result: torch.Tensor = operator(grad, output, dim, input_dtype)
        del product
        return result

    try:
        autograd.impl(operator, backward)
        yield
    finally:
        autograd._destroy()


def _is_autocast_enabled(device: str = "cpu") -> bool:
    """Replaces `torch.is_autocast_enabled`. Without an argument, as PEFT and Nemotron call it, PyTorch's returns the state for CUDA."""
    return _autocast_is_enabled(device)


def operator_named(name: str) -> Callable[..., Any]:
    """The ATen operator called `name`, which may end in a dot and an overload."""
    packet, _, overload = name.partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not tensor.numel():
        return tensor  # no copy, unlike the decomposition in Python
    if p == 1:
        return tensor * tensor.new_zeros(())
    kept: torch.Tensor = torch.ops.aten.native_dropout.default(tensor, p, train)[0]
    return kept


def _cast(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator's result in fp32. Its last argument is cast first, as in PyTorch (`on_gpu.autocast_inputs` says why)."""
    last_first = [arg.float() if isinstance(arg, torch.Tensor) and _is_half(arg) else arg for arg in reversed(args)]
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*reversed(last_first), **kwargs)


def _cast_to_half(operator: Any, *args: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    args = tree_map_only(torch.Tensor, lambda t: t.to(half) if t.dtype == torch.float32 else t, args)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*args)


def _cast_unless_asked(operator: Any, *args: Any, **kwargs: Any) -> Any:
    last = operator._schema.arguments[len(args) - 1].name
    asked = args[-1] if last == "dtype" else kwargs.get("dtype")
    if asked is None and _is_half(args[0]):
        args = args[:-1] if last == "dtype" else args
        kwargs = {**kwargs, "dtype": torch.float32}
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*args, **kwargs)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)
