"""Watch allocations and frees of tensor storages, for fake or real tensors.

A dispatch mode sees every operator's outputs, and a weak reference reports the end of a storage. FSDP allocates and frees with
`UntypedStorage.resize_`, which bypasses dispatch, so that method is patched. DTensor arguments are passed down, so that the local
tensors are seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

StorageKey = int
_DEVICE = torch.ops.prim.device.default
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_USES_OF_STORAGE, _USES_OF_TENSOR = 2, 4
"""Reference count, seen in a dispatch mode, of a gradient that only autograd holds. It includes the call's own references."""


class StorageWatch(TorchDispatchMode):
    """Calls `on_resize(key, old_bytes, new_bytes, operator, args)` at each allocation (old 0), resize and free (new 0) of a storage.

    Storages passed to `ignore` are not reported. Keys may be reused after a free. `sums_in_place`: add gradients in place, as autograd
    does without a dispatch mode (under one it does not). `call(func, args, kwargs)`: runs an operator.
    """

    def __init__(
        self,
        on_resize: Callable[[StorageKey, int, int, str, tuple[Any, ...]], None],
        *,
        sums_in_place: bool = False,
        call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._call = call or call_plainly
        self._on_resize = on_resize
        self._sums_in_place = sums_in_place
        self._live: dict[StorageKey, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._operator = "start"
        self._args: tuple[Any, ...] = ()
        self.on_operator: Callable[[Any, tuple[Any, ...]], None] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: Dynamo is not disabled in this mode. Disabling it would cost time in each operator's call, and nothing is compiled
        here.
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: `torch.compile` may compile in this mode, which does not see the compiler's own tensors."""
        return True

    def ignore(self, tensor: torch.Tensor) -> None:
        storage = local_tensor(tensor).untyped_storage()
        key = storage._cdata
        self._live[key] = (weakref.ref(storage, partial(self._died, key)), -1)

    def watches(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was seen or is ignored."""
        return local_tensor(tensor).untyped_storage()._cdata in self._live

    def see(self, tensor: torch.Tensor) -> None:
        """Register a tensor's storage, if it is new."""
        storage = local_tensor(tensor).untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        n_bytes = storage.nbytes()
        self._live[key] = (weakref.ref(storage, partial(self._died, key)), n_bytes)
        if n_bytes:
            self._on_resize(key, 0, n_bytes, self._operator, self._args)

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
        if func is _DEVICE:  # by far the most frequent operator, and it returns no tensor
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(map(_is_made_of_tensors, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if func is _ADD and self._sums_in_place and _sums_in_place(args, kwargs):
            func = _ADD_IN_PLACE
        name = func._schema.name
        self._operator, self._args = name, args
        result = self._call(func, args, kwargs)
        self._operator, self._args = name, args
        for tensor in (result,) if type(result) is FakeTensor else tensors_in(result):
            self.see(tensor)
        if self.on_operator is not None:
            self.on_operator(func, args)
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
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # restore the original


@lru_cache(maxsize=64)
def _is_made_of_tensors(kind: type) -> bool:
    """Whether tensors of this class run operators on tensors inside them. DTensor and torchao's tensors in fp8 and MXFP8 do."""
    return issubclass(kind, DTensor) or kind.__name__ in ("Float8TrainingTensor", "MXTensor")


def call_plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator as it is: what a mode does unless it is given another function."""
    return func(*args, **kwargs)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard on this rank, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: tensors, and lists or tuples of them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors_in(item)]
    return []


def _sums_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd, without a dispatch mode, would run this addition of a gradient to the previous one in place.

    It does so if nothing else refers to the previous gradient: neither to the tensor nor (through a view) to its storage. Under a dispatch
    mode it never does. Source: torch/csrc/autograd/input_buffer.cpp, accumulate, can_accumulate_inplace (torch 2.13).
    """
    if kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
        return False
    first, second = args
    return (
        isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) == _USES_OF_STORAGE
        and first._use_count() == _USES_OF_TENSOR
    )
