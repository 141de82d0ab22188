"""Inputs of checkpointed layers that a step keeps in host memory, as transformers' `offload` does.

Source: transformers 5.23, modeling_utils.py, `_activation_checkpointing_enable`; torch 2.13, autograd/graph.py, `save_on_cpu`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class _Copies:
    """The function that is called with the bytes of each copy to or from the host."""

    watcher: Callable[[int], None] | None = None


@contextlib.contextmanager
def watched_copies(watcher: Callable[[int], None]) -> Iterator[None]:
    """Context in which `watcher` gets the bytes of each copy to or from the host."""
    _Copies.watcher = watcher
    try:
        yield
    finally:
        _Copies.watcher = None


class RecordedOnHost(saved_tensors_hooks):
    """`save_on_cpu(pin_memory=True)` as on a GPU: saved tensors hold no memory there, and backward allocates them again.

    A tensor that is not contiguous is first copied on the GPU. Source: ATen/native/cuda/Copy.cpp, copy_requires_temporaries.
    """

    def __init__(self) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
            tensor.contiguous()
            _copied(tensor)
            return tensor.size(), tensor.dtype

        def unpack(saved: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
            shape, dtype = saved
            tensor = torch.empty(shape, dtype=dtype)
            _copied(tensor)
            return tensor

        super().__init__(pack, unpack)


def _copied(tensor: torch.Tensor) -> None:
    if _Copies.watcher is not None:
        _Copies.watcher(tensor.numel() * tensor.element_size())


def save_inputs_on_host(model: nn.Module, hooks: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Let a transformers model that checkpoints layers save their inputs under `hooks`."""
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            setattr(module, "_gradient_checkpointing_func", functools.partial(_under, hooks, function))  # noqa: B010  # transformers' own attribute, unknown to nn.Module


def _under(
    hooks: Callable[[], contextlib.AbstractContextManager[Any]], function: Any, *args: Any, **kwargs: Any
) -> Any:
    with hooks():
        return function(*args, **kwargs)
