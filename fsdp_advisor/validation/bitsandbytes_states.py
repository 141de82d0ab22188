"""Optimizers of bitsandbytes under fake tensors. Their kernels update in place, as on a GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fsdp_advisor.policies.optimizers.bitsandbytes import PAGED_MIN_ELEMENTS, QUANTIZATION_TABLE_BYTES
from fsdp_advisor.validation.meter import StorageMeter


class _TableOnHost:
    """A table of codes as an optimizer makes it, value by value, on the host. The first 8-bit state copies it to the GPU."""

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.empty(QUANTIZATION_TABLE_BYTES // 4, device=device)


@contextlib.contextmanager
def states_as_on_gpu(meter: StorageMeter) -> Iterator[None]:
    """Context in which bitsandbytes' optimizers make the states that they make on a GPU. The meter ignores paged states, which are in
    CUDA's managed memory and not PyTorch's.

    Source: bitsandbytes 0.50.2, optim/optimizer.py, `fill_qmap` and `get_state_buffer`; optim/ademamix.py; _ops.py, the fake
    `optimizer_update_*`.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    base: Any = importlib.import_module("bitsandbytes.optim.optimizer")
    base.GlobalOptimManager.get_instance().initialize()  # the Trainer registers embeddings here, by the addresses of parameters

    def paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        state = torch.empty(shape, dtype=dtype, device=device)
        meter.ignore(state)
        return state

    def state_of(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self.is_paged and p.numel() >= PAGED_MIN_ELEMENTS:
            return paged(*p.shape, dtype=dtype, device=p.device)
        return torch.zeros_like(p, dtype=dtype)

    with (
        mock.patch.object(base.Optimizer8bit, "get_state_buffer", state_of),
        mock.patch.multiple(
            base.F, get_paged=paged, fill=lambda *_: None, create_dynamic_map=lambda *_, **__: _TableOnHost()
        ),
    ):
        yield
