"""Autocast as a GPU does it, on tensors that say they are on a CPU.

What autocast casts depends on the device: on a GPU norms, softmax, powers and sums are computed in fp32, on a CPU they are not. A
step is recorded and simulated on a CPU, so the CPU's rules are replaced by the GPU's for as long as that takes.
Source: aten/src/ATen/autocast_mode.h (torch 2.13), `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`, `AT_FORALL_PROMOTE` and
`AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE`; the list of lower precision is the CPU's own, whose products are the same.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_AUTOCAST = torch._C.DispatchKey.AutocastCPU

FP32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "dist",
    "pdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
"""Inputs are cast to fp32."""

FP32_OUTPUT = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
"""Asked for an output in fp32, unless the caller asks for another."""

NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same, under another overload."""

WIDEST = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"]
"""Inputs are cast to the widest among them."""

AS_IT_IS = [
    "cross_entropy_loss",
    "cat",
    "stack",
    "index_copy",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "avg_pool3d",
    "adaptive_avg_pool3d",
    "max_pool3d",
    "polar",
    "quantile",
    "quantile.scalar",
    "view_as_complex",
    "trace",
    "fft_fft",
    "fft_ifft",
    "fft_fft2",
    "fft_ifft2",
    "fft_fftn",
    "fft_ifftn",
    "fft_rfft",
    "fft_irfft",
    "fft_rfft2",
    "fft_irfft2",
    "fft_rfftn",
    "fft_irfftn",
]
"""Cast on a CPU alone."""


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """While this lasts, `torch.autocast("cpu")` casts what `torch.autocast("cuda")` does."""
    library = torch.library.Library("aten", "IMPL")  # destroyed below
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden is what is wanted
        for names, kernel in ((FP32, _fp32), (FP32_OUTPUT, _fp32_output), (NORM, _norm), (WIDEST, _widest)):
            for name in names:
                library.impl(name, _without_autocast(kernel(name)), _AUTOCAST.name)
        for name in AS_IT_IS:
            library.impl(name, torch.library.fallthrough_kernel, _AUTOCAST.name)
    try:
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return call(*args, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    """`is_eligible` in autocast_mode.h."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, tree)


def _fp32(name: str) -> Callable[..., Any]:
    operator = _overload(name)
    return lambda *args, **kwargs: operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _fp32_output(name: str) -> Callable[..., Any]:
    operator = _overload(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        asked = args[position] if len(args) > position else kwargs.get("dtype")
        if _is_cast(args[0]) and asked is None:
            args = args[:position]
            kwargs["dtype"] = torch.float32
        return operator(*args, **kwargs)

    return call


def _norm(name: str) -> Callable[..., Any]:
    operator, asking = _overload(name), _overload(NORM[name])

    def call(*args: Any, **kwargs: Any) -> Any:
        return asking(*args, **kwargs, dtype=torch.float32) if _is_cast(args[0]) else operator(*args, **kwargs)

    return call


def _widest(name: str) -> Callable[..., Any]:
    operator = _overload(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        wide = any(_is_cast(leaf) and leaf.dtype is torch.float32 for leaf in leaves)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call
