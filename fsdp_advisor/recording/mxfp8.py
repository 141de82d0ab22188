"""Linear layers that multiply in MXFP8, by the layer of torchao's prototype (`torchao.prototype.moe_training.mxfp8_linear`, 0.18).

32 neighbouring elements share a scale of one byte. Each product casts both of its operands along the dimension that it sums over. A kernel
of Triton casts along rows, for forward and for the gradient of the input. A kernel of CUDA casts along columns, for the gradient of the
weight and for the weight in backward. The scales are then copied twice into the layout of the product's kernel, in blocks of 128 x 4, which
they fill with zeros. Weights, activations and gradients between the layers are in bf16. Autograd saves the operands in bf16 and casts them
again in backward.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fsdp_advisor.recording.fake_operators import fake_operator
from fsdp_advisor.recording.fused_kernels import empty

BLOCK = 32
"""The elements that share a scale. Source: torchao 0.18, prototype/moe_training/mxfp8_linear.py, `_to_mxfp8_then_scaled_mm`."""


def linear_in_mxfp8(layer: nn.Linear, mxfp8_linear: type[nn.Linear]) -> nn.Linear:
    """A layer of torchao's class `mxfp8_linear` with the parameters of `layer`."""
    with torch.device("meta"):
        found = mxfp8_linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    found.weight, found.bias = layer.weight, layer.bias
    return found


@contextlib.contextmanager
def kernels_on_fake_tensors() -> Iterator[None]:
    """Context in which the layers call operators that allocate the same as torchao's kernels. A machine without a GPU does not have these
    kernels.
    """
    tensor: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    kernels: Any = importlib.import_module("torchao.prototype.mx_formats.kernels")
    with (
        mock.patch.object(tensor, "triton_to_mxfp8_dim0", _cast_rows),
        mock.patch.object(kernels, "mxfp8_quantize_cuda", _cast_columns),
    ):
        yield


def _cast_rows(
    x: torch.Tensor, inner_block_size: int = BLOCK, scaling_mode: str = "rceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and scales of `torchao::triton_to_mxfp8_dim0`. Source: torchao 0.18, prototype/mx_formats/kernels.py."""
    assert x.is_contiguous(), "`x` must be contiguous"
    assert x.dtype == torch.bfloat16, f"only bfloat16 inputs are supported, got {x.dtype}"
    assert x.shape[-1] % BLOCK == 0, "columns must be divisible by inner block size"
    make = empty if get_proxy_mode() is None else _empty_in_graph
    elements = make(x.shape, x, torch.float8_e4m3fn)
    scales = make((x.shape[0], x.shape[1] // BLOCK), x, torch.uint8)
    _write_rows(x, elements, scales)
    return elements, scales.view(torch.float8_e8m0fnu)


def _cast_columns(
    x: torch.Tensor, rowwise: bool = False, colwise: bool = True, scaling_mode: str = "rceil"
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The elements and scales of `torchao::mxfp8_quantize`. Source: torchao 0.18, csrc/cuda/mx_kernels/mxfp8_extension.cpp."""
    assert x.shape[0] % BLOCK == 0, "rows must be a multiple of 32"
    assert x.shape[1] % BLOCK == 0, "cols must be a multiple of 32"
    elements, scales = _columns(x)
    return None, elements, None, scales


@fake_operator("mxfp8_rows", mutates=("elements", "scales"))
def _write_rows(x: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the elements in fp8, and the scales as bytes."""


def _empty_in_graph(shape: Iterable[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the device of `like`, made by an operator of the graph, as torchao makes it: the compiler may make it again in
    backward, or give it the storage of another one.
    """
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


@fake_operator("mxfp8_columns")
def _columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements in fp8 and the scales, both with adjacent columns."""
    rows, columns = x.shape
    elements = torch.empty_strided((rows, columns), (1, rows), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (columns, rows // BLOCK)
    return elements, torch.empty_strided(shape, (1, columns), dtype=torch.float8_e8m0fnu, device=x.device)
