"""Offload of activations to host memory: of the inputs of checkpointed layers (transformers' `offload`), or of the tensors that are saved
for backward.

Source: transformers 5.23, modeling_utils.py, `_activation_checkpointing_enable`; torch 2.13, autograd/graph.py, `save_on_cpu`; trl 1.16,
models/activation_offloading.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.checkpointing import OffloadCode


class _Copies:
    """Holds the function that is called with the bytes of each copy to or from the host."""

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
    """`save_on_cpu(pin_memory=True)` as on a GPU: saved tensors take no GPU memory, and backward allocates them again.

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


_Key = tuple[StorageWeakRef, int | torch.SymInt, torch.dtype]
"""A tensor's storage, offset and dtype. The reference does not keep the storage's memory, but no other storage gets its address."""


class RecordedOffload(saved_tensors_hooks):
    """TRL's `OffloadActivations` as on a GPU, without its streams. Forward keeps the last tensors until their copies have ended.
    Backward keeps a tensor that it copies back until the node after the tensor's own has run.

    TRL recognizes tensors by their address, and leaves one on the GPU that has the address of a freed one, such as casts of frozen fp32
    weights of equal shapes. Which ones the allocator decides; a recording offloads them all.
    """

    least_bytes, kept_in_forward = 1024, 5
    """The least size of offloaded tensors, and the number of most recent tensors that forward keeps. Source: `min_offload_size`,
    `max_fwd_stash_size`.
    """

    def __init__(self, own_weights: Iterable[torch.Tensor]) -> None:
        """`own_weights`: the parameters whose storages it recognizes and does not offload. Parameters that FSDP2 gathers have other
        storages.
        """
        self._weights = {weight.untyped_storage()._cdata for weight in own_weights}
        self._count = 0
        self._packed: dict[int, torch.Tensor | _OnHost] = {}
        self._numbers: dict[_Key, int] = {}  # the number of the tensor that is copied; later ones with the key share it
        self._keys: dict[int, _Key] = {}
        self._leaving: dict[int, torch.Tensor] = {}
        self._returned: dict[int, torch.Tensor] = {}
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._count += 1
        number, storage = self._count, tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor.storage_offset(), tensor.dtype
        if key in self._numbers:
            self._track(number, key)
        elif (
            tensor.numel() * tensor.element_size() >= self.least_bytes
            and not isinstance(tensor, nn.Parameter)
            and storage._cdata not in self._weights
        ):
            self._copy(number, tensor, key)
            return number
        self._packed[number] = tensor
        return number

    def _copy(self, number: int, tensor: torch.Tensor, key: _Key) -> None:
        is_broadcast = 0 in tensor.stride()
        if not is_broadcast and (not tensor.is_contiguous() or tensor.storage_offset()):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for earlier in list(self._leaving):
            if earlier > number - self.kept_in_forward:
                break
            self._forget(earlier)
        shape = (tensor.untyped_storage().size() // tensor.element_size(),) if is_broadcast else tensor.size()
        self._packed[number] = _OnHost(shape, tensor.dtype, tensor.size(), tensor.stride())
        _copied_bytes(prod(shape) * tensor.element_size())
        self._leaving[number] = tensor
        self._track(number, key)

    def _track(self, number: int, key: _Key) -> None:
        self._numbers[key] = number
        self._keys[number] = key

    def _release(self, number: int) -> None:
        key = self._keys.pop(number, None)
        if key is not None and self._numbers.get(key) == number:
            del self._numbers[key]

    def _forget(self, number: int) -> None:
        """Drop a tensor whose copy to the host has ended."""
        del self._leaving[number]
        self._release(number)

    def _unpack(self, number: int) -> torch.Tensor:
        packed = self._packed.pop(number)
        if isinstance(packed, torch.Tensor):
            self._release(number)
            return packed
        node: Any = torch._C._current_autograd_node()
        if self._node is None:  # the first tensor: clear at the end of backward
            torch.autograd.Variable._execution_engine.queue_callback(self._returned.clear)
        before = list(self._returned) if node != self._node else []
        self._node = node
        users = 0
        if number in self._leaving:
            tensor = self._leaving[number]
        else:
            tensor = packed.brought_back()
            self._returned[number] = tensor
            users = _users(tensor)

        def node_ends(*_: object) -> None:
            if number in self._returned and _users(self._returned[number]) > users:
                del self._returned[number]  # a view of the tensor is still alive
            for each in list(self._leaving):
                self._forget(each)
            for each in before:
                self._returned.pop(each, None)

        node.register_hook(node_ends)
        self._release(number)
        return tensor

    def __exit__(self, *args: object) -> None:
        self._leaving.clear()
        self._returned.clear()
        self._numbers.clear()
        self._keys.clear()
        self._packed.clear()
        super().__exit__(*args)


class _OnHost(NamedTuple):
    """A tensor that was moved to host memory. `storage`: the shape of its storage; `shape`, `stride`: of the tensor within it."""

    storage: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def brought_back(self) -> torch.Tensor:
        tensor = torch.empty(self.storage, dtype=self.dtype)
        _copied(tensor)
        return torch.as_strided(tensor, self.shape, self.stride, 0)


def _users(tensor: torch.Tensor) -> int:
    """The number of tensors that share the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def offloading(code: OffloadCode, own_weights: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """The context of a step in which the implementation `code` offloads saved tensors to host memory."""
    match code:
        case "saved":
            return RecordedOnHost()
        case "trl":
            return RecordedOffload(own_weights)
        case "none" | "inputs":
            return contextlib.nullcontext()
        case _:
            assert_never(code)


def _copied(tensor: torch.Tensor) -> None:
    _copied_bytes(tensor.numel() * tensor.element_size())


def _copied_bytes(n_bytes: int) -> None:
    if _Copies.watcher is not None:
        _Copies.watcher(n_bytes)


def save_inputs_on_host(model: nn.Module, hooks: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Make a transformers model that checkpoints layers save their inputs under `hooks`."""
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            setattr(module, "_gradient_checkpointing_func", functools.partial(_under, hooks, function))  # noqa: B010  # transformers' own attribute, unknown to nn.Module


def _under(
    hooks: Callable[[], contextlib.AbstractContextManager[Any]], function: Any, *args: Any, **kwargs: Any
) -> Any:
    with hooks():
        return function(*args, **kwargs)
