"""BOFT's layers on a device without values: PEFT computes their permutations one element at a time, and compiles a CUDA kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _BlockDiagonal:
    """What PEFT's extension allocates. z = butterfly factors, N = blocks of width b.

    Source: peft 0.21, tuners/boft/fbd/fbd_cuda_kernel.cu.
    """

    @staticmethod
    def forward(blocks: torch.Tensor) -> list[torch.Tensor]:
        """The matrices (z, N b, N b) of which the blocks (z, N, b, b) are the diagonal."""
        z, n, b, _ = blocks.shape
        return [blocks.new_zeros(z, n * b, n * b)]

    @staticmethod
    def backward(_: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros_like(blocks)]


@contextlib.contextmanager
def layers_without_values(factor: int) -> Iterator[None]:
    """Context in which BOFT's layers are built with permutations whose values are not computed.

    `factor`: `boft_n_butterfly_factor`. PEFT trains with 1 if its extension cannot be compiled, so for more than 1 the extension is
    taken to be there; for 1 it is not, as without a CUDA compiler.
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
