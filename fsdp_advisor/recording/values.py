"""Values for small fake tensors, for models whose step depends on them: grids of images, placeholders, lengths.

A fake tensor has no values. For each small storage whose content follows from known numbers, this mode keeps a second, real storage, and
repeats every operator on it. So `item`, `nonzero` and an index by a mask have the same results as in training. Tensors computed from
weights or pixels have no values. Only storages of fake tensors are recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fsdp_advisor.recording.contents import Contents
from fsdp_advisor.recording.experts import chosen_experts
from fsdp_advisor.recording.storages import call_plainly, tensors_in

LARGEST = 256 << 20
"""Bytes of the largest storage whose values are kept. Gemma 4's one-hot matrix of 2,520 patches and 280 tokens has 5.4 MiB per image."""

_CPU = torch.device("cpu")
_aten: Any = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_INDEX, _SELECT = _aten.index.Tensor, _aten.masked_select.default
_FALSE = (_aten.eq.Scalar, _aten.isinf.default)
"""Comparisons whose result on unknown numbers (pixels or weights) is assumed to be False: no number equals the given one or is
infinite. Idefics finds padding tiles in this way, and VB-LoRA weights that a checkpoint lacks.
"""
_SIZED_BY_VALUES = (
    _INDEX, _SELECT, _aten.nonzero.default, _aten.repeat_interleave.Tensor, _aten._unique2.default,
    _aten.unique_consecutive.default, _aten.unique_dim.default, _aten.bincount.default,
)  # fmt: skip
"""Operators whose number of result elements depends on values."""
_CHOICE = _aten.topk.default
"""The operator with which routers choose experts."""
_CONCATENATED = _aten.cat.default
"""The operator with which GLM-5.3 stores the mask of its tokens next to their keys, whose values are unknown."""
_EMPTY = (_aten.new_empty.default, _aten.new_empty_strided.default, _aten.empty_like.default)
"""Operators whose result is uninitialized memory. It is assumed to be zeros, so that indices in it exist."""
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True, slots=True)
class _Known:
    """The values of a storage. `content`: the number of `Contents`. `where`: which elements are known; None if all are."""

    storage: weakref.ref[torch.UntypedStorage]
    values: torch.Tensor
    content: int
    where: torch.Tensor | None = None


class KnownValues(TorchDispatchMode):
    """Keeps the values of small tensors. Enter it within a FakeTensorMode."""

    def __init__(
        self,
        expert_imbalance: float | None = None,
        call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        contents: Contents | None = None,
    ) -> None:
        """`call(func, args, kwargs)`: runs an operator on fake tensors. `contents`: those of earlier steps.

        `expert_imbalance`: the tokens of the busiest expert as a multiple of the mean, for routers that choose by unknown numbers;
        None: their choices are unknown too.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._expert_imbalance = expert_imbalance
        self._call = call or call_plainly
        self._known: dict[int, _Known] = {}
        self._contents = Contents() if contents is None else contents

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if _Current.is_unread:
            return self._call_with_unknown(func, args, kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        if _RANDOM in func.tags or not all(map(self._has_value, tensors)):
            return self._call_with_unknown(func, args, kwargs)
        if func is _ITEM:
            with _on_host():
                return self._value(tensors[0]).item()
        if not tensors and not _makes_few(func, args, kwargs):
            return func(*args, **kwargs)
        return self._call_with_known(func, args, kwargs)

    def _call_with_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator with an argument whose values are unknown. The tensors that it writes are unknown afterwards."""
        if func is _INDEX:
            args = (args[0], self._places(args[1]))
        if func is _SELECT and (mask := self.value_of(args[1])) is not None:
            return args[0].new_empty(_selected(mask, torch.broadcast_shapes(args[0].shape, mask.shape)))
        written = _written(func, args, kwargs)
        result = self._call(func, args, kwargs)
        for tensor in written:
            self._forget(tensor)
        if func in _FALSE and _are_few([result]):
            self._learn(result, None)
        elif func is _CONCATENATED and result.is_contiguous() and _are_few([result]):
            self._learn_parts(result, args[0], args[1] if len(args) > 1 else 0)
        elif func is _CHOICE and self.assumes_result_of(func):
            self._choose(result[1], args[0].shape, kwargs.get("dim", args[2] if len(args) > 2 else -1))
        return result

    def _call_with_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator on arguments with known values.

        Computes and keeps the values of the result too, unless it is large or a view: the values of a view's storage are known.
        """
        result, written = None, _written(func, args, kwargs)
        is_sized_by_values = func in _SIZED_BY_VALUES  # fake tensors do not know the size: the values come first
        if not is_sized_by_values:
            result = self._call(func, args, kwargs)
            new = [t for t in tensors_in(result) if not self.knows(t)]
            if not written and (not new or not _are_few(new)):
                return result
        made_by = self._made_by(func, args, kwargs)

        def on_host() -> Any:
            host_args = map(self._hosted, args)
            host_kwargs = {name: self._hosted(value) for name, value in kwargs.items()}
            with _on_host():
                made = func(*host_args, **host_kwargs)
                return made.zero_() if func in _EMPTY else made

        if is_sized_by_values:
            made = self._contents.find(made_by, on_host)
            result = tree_map(self._empty_like, made)
        else:
            made = on_host()
            for tensor in written:
                self._change(tensor)
        owned = made_by is not None and not is_sized_by_values
        for number, (tensor, value) in enumerate(zip(tensors_in(result), tensors_in(made), strict=True)):
            self._learn(tensor, value, made_by and (number, made_by), owned=owned)
        return result

    def _hosted(self, value: Any) -> Any:
        """An argument of an operator with real tensors in place of fake ones. The values of all are known."""
        if isinstance(value, torch.Tensor):
            return self._value(value)
        return [self._hosted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _made_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """A key that is equal for calls of an operator with equal results; None if an argument is a real tensor. All others are known."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        known = self._describe(args, parts)
        for name, value in kwargs.items():
            parts.append(name)
            known = self._describe((value,), parts) and known
        return tuple(parts) if known else None

    def _describe(self, values: Sequence[Any], parts: list[Any]) -> bool:
        """Append to `parts` what decides the values of an operator's arguments. Returns whether none is a real tensor."""
        parts.append(len(values))
        for value in values:
            if isinstance(value, FakeTensor):
                content = self._known[value.untyped_storage()._cdata].content
                parts += (content, value.shape, value.stride(), value.storage_offset())
            elif isinstance(value, torch.Tensor):
                return False
            elif isinstance(value, (list, tuple)):
                if not self._describe(value, parts):
                    return False
            else:
                parts += (type(value), value)
        return True

    def __enter__(self) -> KnownValues:
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(torch, "tensor", _tensor))
        self._patches.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist))
        _Current.values = self
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._patches.close()
        _Current.values = None

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known."""
        return tensor.untyped_storage()._cdata in self._known

    def _has_value(self, tensor: torch.Tensor) -> bool:
        """Whether `value_of` returns a tensor, found without making it."""
        if not isinstance(tensor, FakeTensor):
            return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None or known.values.dtype != tensor.dtype:
            return False
        if known.where is None:
            return True
        where = _view_of(known.where, tensor)
        with _on_host():
            return bool(where.all())

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the values of `tensor`; None if they are unknown."""
        return self._value(tensor) if self._has_value(tensor) else None

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """`value_of` a tensor whose values are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        return _view_of(self._known[tensor.untyped_storage()._cdata].values, tensor)

    def _learn(
        self, tensor: torch.Tensor, value: torch.Tensor | None, made_by: Hashable = None, *, owned: bool = False
    ) -> None:
        """Keep the values of a tensor whose storage is new. `value` None means all zeros, or False. `made_by`: as in `Contents`. `owned`:
        nothing else has the storage of `value`.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() // tensor.element_size()
        with _on_host():
            fills = value is not None and (value.numel(), value.dtype) == (size, tensor.dtype)
            if value is not None and fills and value.is_contiguous() and tensor.is_contiguous():
                held = value.flatten() if owned else value.flatten().clone()  # takes half as long as filling zeros
            else:
                held = torch.zeros(size, dtype=tensor.dtype)
                if value is not None:
                    held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self._keep(storage, held, made_by=made_by)

    def _learn_parts(self, result: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
        """Keep the known values among `parts`, which were concatenated to `result` along `dim`."""
        parts = [part for part in parts if part.shape != (0,)]  # which has no such dimension, and is left out
        if not any(map(self.knows, parts)):
            return
        sizes = [part.shape[dim] for part in parts]
        with _on_host():
            values, where = torch.zeros(result.shape, dtype=result.dtype), torch.zeros(result.shape, dtype=torch.bool)
            for part, its_values, its_where in zip(
                parts, values.split(sizes, dim), where.split(sizes, dim), strict=True
            ):
                known = self._known.get(part.untyped_storage()._cdata)
                if known is not None and known.values.dtype == part.dtype:
                    its_values.copy_(_view_of(known.values, part))
                    its_where.copy_(torch.tensor(True) if known.where is None else _view_of(known.where, part))
            self._keep(result.untyped_storage(), values.flatten(), where.flatten())

    def _keep(
        self,
        storage: torch.UntypedStorage,
        values: torch.Tensor,
        where: torch.Tensor | None = None,
        made_by: Hashable = None,
    ) -> None:
        key = storage._cdata
        reference = weakref.ref(storage, lambda _: self._known.pop(key, None))
        self._known[key] = _Known(reference, values, self._contents.number(made_by), where)

    def _change(self, tensor: torch.Tensor) -> None:
        """Note that an operator has written to a tensor with known values."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            self._known[key] = replace(self._known[key], content=self._contents.number())

    def assumes_result_of(self, func: Any) -> bool:
        """Whether this mode assumes a result of the operator if its inputs are unknown: comparisons are False, and a router
        chooses by `expert_imbalance`.
        """
        return func in _FALSE or (func is _CHOICE and self._expert_imbalance is not None)

    def _choose(self, indices: torch.Tensor, scores: torch.Size, dim: int) -> None:
        """Keep the assumed choices of a router, `indices`. `scores`: the shape of its scores, whose dimension `dim` has the experts."""
        assert self._expert_imbalance is not None
        chosen = indices.shape[dim]
        rows = indices.movedim(dim, -1).shape
        with _on_host():
            choice = indices.numel() // chosen, chosen, scores[dim], self._expert_imbalance
            picked = chosen_experts(*choice)
            self._learn(indices, picked.view(rows).movedim(-1, dim), ("choice", choice, rows, dim, indices.stride()))

    def _empty_like(self, value: Any) -> Any:
        """A fake tensor of the same shape as a real one."""
        if not isinstance(value, torch.Tensor):
            return value
        settings = {"dtype": value.dtype, "device": _CPU}
        return self._call(_aten.empty_strided.default, (tuple(value.shape), value.stride()), settings)

    def _forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def _places(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The indices of an indexing operator, with each mask replaced by the integer indices that it selects.

        Source: ATen/native/TensorAdvancedIndexingUtils.h, expandTensors, which does the same.
        """
        places: list[torch.Tensor | None] = []
        for index in indices:
            value = None if index is None or index.dtype != torch.bool else self.value_of(index)
            if value is None:
                places.append(index)
            else:
                count = _selected(value, value.shape)
                places += [torch.empty(count, dtype=torch.long, device="cpu") for _ in value.shape]
        return places


def needs_values(error: Exception) -> bool:
    """Whether an error of a step under fake tensors says that the model's code reads values of tensors."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


class _Current:
    values: KnownValues | None = None
    is_unread = False


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Context in which results have no values, because nothing reads them: a mask of floats takes hundreds of megabytes in each layer."""
    _Current.is_unread = True
    try:
        yield
    finally:
        _Current.is_unread = False


def depends(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the mode has to repeat an operator on these tensors, because it makes or changes known values."""
    values = _Current.values
    return values is not None and (not tensors or values.assumes_result_of(func) or any(map(values.knows, tensors)))


_make_tensor = torch.tensor


def _tensor(data: Any, **settings: Any) -> torch.Tensor:
    """Replaces `torch.tensor`, which bypasses every mode when it reads the values of tensors in a list."""
    if isinstance(data, (list, tuple)):
        data = tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, FakeTensor) else leaf, data)
    return _make_tensor(data, **settings)


_list_one_by_one = FakeTensor.tolist


def _tolist(tensor: FakeTensor) -> Any:
    """Replaces `FakeTensor.tolist`, which calls two operators for each element: a second for the types of 10,000 tokens."""
    value = _Current.values.value_of(tensor) if _Current.values is not None else None
    if value is None:
        return _list_one_by_one(tensor)
    with _on_host():
        return value.tolist()


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Context in which tensors are real."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def _view_of(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a storage that belong to `tensor`."""
    with _on_host():
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _selected(mask: torch.Tensor, shape: torch.Size) -> int:
    """The number of elements that a real mask selects after it is expanded to `shape`."""
    with _on_host():
        return int(mask.expand(shape).count_nonzero())  # `sum` converts the whole mask to 64-bit integers


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    arguments = func._schema.arguments
    written = [value for a, value in zip(arguments, args, strict=False) if _is_written(a)]
    return tensors_in([*written, *(kwargs[a.name] for a in arguments if _is_written(a) and a.name in kwargs)])


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _are_few(tensors: list[torch.Tensor]) -> bool:
    return all(t.untyped_storage().nbytes() <= LARGEST for t in tensors)


def _makes_few(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator without tensor arguments makes a tensor of known content."""
    return not func._schema.name.startswith(("aten::empty", "prim::", "profiler::"))
