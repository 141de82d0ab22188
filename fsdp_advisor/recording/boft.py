"""Recording of BOFT's layers without computing their permutations (which PEFT does one element at a time) or compiling its CUDA kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _BlockDiagonal:
    """The allocations of PEFT's CUDA extension. z = butterfly factors, N = blocks of width b.

    Source: peft 0.21, tuners/boft/fbd/fbd_cuda_kernel.cu.
    """

    @staticmethod
    def forward(blocks: torch.Tensor) -> list[torch.Tensor]:
        """The block-diagonal matrices of shape (z, N b, N b) with the given blocks of shape (z, N, b, b)."""
        z, n, b, _ = blocks.shape
        return [blocks.new_zeros(z, n * b, n * b)]

    @staticmethod
    def backward(_: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros_like(blocks)]


@contextlib.contextmanager
def layers_without_values(factor: int) -> Iterator[None]:
    """Context in which BOFT's layers are built with permutations whose values are not computed.

    `factor`: `boft_n_butterfly_factor`. PEFT reduces it to 1 if its extension cannot be compiled. So above 1 the extension is assumed to
    be compiled, and at 1 it is not.
    """
    from peft.tuners.boft import layer

    vars(layer)["_FBD_CUDA"] = _BlockDiagonal if factor > 1 else None  # the layers call it later, in each step
    extension: dict[str, Any] = {} if factor > 1 else {"get_fbd_cuda": lambda: None}
    with (
        mock.patch.multiple(layer, **extension) if extension else contextlib.nullcontext(),
        mock.patch.object(layer.BOFTLayer, "block_butterfly_perm", lambda self, n, *_: torch.arange(n)),
        mock.patch.object(layer.BOFTLayer, "perm2mat", lambda self, indices: torch.zeros((len(indices), len(indices)))),
    ):
        yield
