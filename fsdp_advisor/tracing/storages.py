"""Watching tensor storages be born and die, under fake or real tensors.

A dispatch mode sees every operator's outputs; a weak reference tells of a storage's end; `UntypedStorage.resize_`, which FSDP
uses to free and to allocate and which bypasses dispatch, is watched by patching. DTensor arguments are passed down so that the
local tensors are what is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

StorageKey = int
_DEVICE = torch.ops.prim.device.default
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_HELD_BY_THE_ENGINE = (4, 2)
"""Uses of a tensor and of its storage, as a dispatch mode counts them, that nothing but autograd's input buffer holds; of what Python
adds up there are one less. (torch 2.11 and 2.13)"""


class StorageWatch(TorchDispatchMode):
    """Calls `on_resize(key, old_bytes, new_bytes, operator, args)` at each birth (old 0), resize and death (new 0) of a storage.

    Storages handed to `ignore` are not reported. Keys may be used again after a death.
    """

    def __init__(self, on_resize: Callable[[StorageKey, int, int, str, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._on_resize = on_resize
        self._live: dict[StorageKey, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._operator = "start"
        self._args: tuple[Any, ...] = ()
        self.on_operator: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        self.sums_in_place = False
        """Whether autograd sums gradients as without a dispatch mode: into the first, where nothing else holds it.
        Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace (torch 2.13)."""

    def ignore(self, tensor: torch.Tensor) -> None:
        storage = local_tensor(tensor).untyped_storage()
        key = storage._cdata
        self._live[key] = (weakref.ref(storage, partial(self._died, key)), -1)

    def see(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor's storage, if it is new."""
        storage = local_tensor(tensor).untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = (weakref.ref(storage, partial(self._died, key)), 0)
        self._resized(key, storage.nbytes())

    def _resized(self, key: StorageKey, n_bytes: int) -> None:
        reference, before = self._live[key]
        if before >= 0 and n_bytes != before:
            self._live[key] = (reference, n_bytes)
            self._on_resize(key, before, n_bytes, self._operator, self._args)

    def _died(self, key: StorageKey, _: object) -> None:
        _, n_bytes = self._live.pop(key)
        if n_bytes > 0:
            self._on_resize(key, n_bytes, 0, self._operator, self._args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # the most frequent by far, and no tensor comes of it
            return func(*args)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._operator, self._args = func._schema.name, args
        if self.sums_in_place and func is _ADD and _held_by_the_engine(*args):
            result = _ADD_IN_PLACE(*args)
        else:
            result = func(*args, **kwargs)
        self._operator, self._args = func._schema.name, args
        for tensor in tensors_in(result):
            self.see(tensor)
        if self.on_operator is not None:
            self.on_operator(func, args, kwargs, result)
        self._args = ()
        return result

    def __enter__(self) -> StorageWatch:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            result = self._resize(storage, n_bytes)
            if storage._cdata in self._live:
                self._operator = "resize_"
                self._resized(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # no hook exists for it
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # likewise
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # the original again


def _held_by_the_engine(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or torch.is_grad_enabled():
        return False
    if first._is_view() or first.shape != second.shape or first.dtype != second.dtype:
        return False
    storage = first.untyped_storage()
    uses = first._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]  # missing in torch's stubs
    return uses == _HELD_BY_THE_ENGINE


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: tensors, and lists or tuples of them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors_in(item)]
    return []
