"""The copies that convolutions over one dimension make of an input that is not contiguous, such as a transposed one.

PyTorch makes them on every device, in forward and in backward, but fake tensors do not. Source: torch 2.13,
aten/src/ATen/native/Convolution.cpp, `_convolution` and `convolution_backward`, "avoid accidentally going through NHWC".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from fsdp_advisor.recording.flash import scratch

_conv1d = F.conv1d


@contextlib.contextmanager
def with_copies_of_inputs() -> Iterator[None]:
    """Context in which a convolution over one dimension makes these copies, as scratch."""
    autograd = torch.library.Library("aten", "IMPL", "AutogradCPU")
    operator = torch.ops.aten.convolution_backward.default

    def backward(grad: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            copy = _copy(tensor) if weight.dim() == 3 else None
            result = operator(grad, tensor, weight, *args)
        del copy
        return result

    try:
        autograd.impl(operator, backward)
        with mock.patch.object(F, "conv1d", _forward):
            yield
    finally:
        autograd._destroy()


def _forward(tensor: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        weight, tensor = weight.to(half), tensor.to(half)  # in the order of autocast
    copy = _copy(tensor)
    result = _conv1d(tensor, weight, *args, **kwargs)
    del copy
    return result


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_contiguous():
        return None
    with scratch():
        return tensor.detach().contiguous()
