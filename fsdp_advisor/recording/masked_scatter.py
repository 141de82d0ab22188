"""`torch.Tensor.masked_scatter` as on CUDA. Models use it to replace placeholder tokens by the outputs of a vision tower."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.recording.flash import scratch


class _MaskedScatter(torch.autograd.Function):
    """The operator with the temporaries of CUDA's kernels, which a dispatch mode does not see.

    Forward: the sum of the mask before each element in int64, and the mask expanded to every element. Backward: the indices of the
    selected elements, one int64 per dimension. Source: torch 2.13, ATen/native/cuda/IndexKernel.{cpp,cu}, masked_scatter__cuda and
    launch_masked_scatter_kernel, masked_select_out_cuda_impl; autograd/FunctionsManual.cpp, masked_scatter_backward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        out = tensor.clone(memory_format=torch.contiguous_format)
        with scratch():
            taken = [torch.empty(tensor.shape, dtype=dtype, device=tensor.device) for dtype in (torch.long, torch.bool)]
        del taken
        ctx.save_for_backward(mask)
        ctx.shape = source.shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (mask,), (grad,) = ctx.saved_tensors, grads
        of_tensor = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        of_source = None
        if ctx.needs_input_grad[2]:
            with scratch():
                places = grad.new_empty((grad.dim(), ctx.shape.numel()), dtype=torch.long)
            of_source = grad.new_empty(ctx.shape)
            del places
        return of_tensor, None, of_source


def masked_scatter(tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The result of `Tensor.masked_scatter`."""
    out: torch.Tensor = _MaskedScatter.apply(tensor, mask, source)  # type: ignore[no-untyped-call]  # torch's
    return out
