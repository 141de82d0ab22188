"""A cache of the results of operators on fake tensors, by the shapes of their arguments.

The layers of a model, the phases of a step and the tapes of several keys call the same operators with the same shapes thousands of times.
A call on PyTorch's fake tensors takes a third of a millisecond, and a result from the cache a tenth of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor.recording import values as known_values
from fsdp_advisor.recording.contents import Contents
from fsdp_advisor.recording.operators import NONE, Work, work_of

MOST = 200_000
"""The largest number of calls in the cache (some 100 MB). When it is reached, the cache is emptied."""
_CPU = torch.device("cpu")
_INDEX = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8, torch.int8)
"""The dtypes of an index that is a mask, whose values decide the shape of the result."""
_SELECT = torch.ops.aten.select.int
_INDEPENDENT_OF_LAST = (torch.ops.aten.select_backward.default, torch.ops.aten.select_scatter.default)
"""Operators whose last argument, an index, does not change the shape of the result."""
_AT_AN_OFFSET = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators with an offset in the storage as an argument. The others do not read that of their tensors."""
_UNPREDICTABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_FRESH, _SAME = -1, -2


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a call returns. `of`: the index of the argument whose storage it shares; -1 for a new storage. `offset`: how many
    elements it begins after that argument. `same`: the tensor is that argument itself.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int
    same: bool


@dataclass(slots=True)
class Outcome:
    """The result of a call, and its work. `container`: list or tuple, or None for a single result. `outputs`: None if the result cannot
    be made again from shapes only.
    """

    container: type | None
    outputs: tuple[_Output | None, ...] | None
    work: Work


@dataclass
class Operators:
    """Calls ATen operators on fake tensors, and caches the results. `contents`: of the values that some tensors have."""

    contents: Contents = field(default_factory=Contents)
    _known: dict[Any, Outcome] = field(default_factory=dict)
    _attributes: dict[str, Any] = field(default_factory=dict)
    _mode: FakeTensorMode | None = None

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_values: bool = True
    ) -> tuple[Any, Work]:
        """The result of `func(*args, **kwargs)`, and its work. `keeps_values`: run an operator that `values.KnownValues` has to repeat."""
        tensors: list[FakeTensor] = []
        key = _key(func, args, kwargs, tensors) if _is_predictable(func) else None
        if key is None or (keeps_values and known_values.depends(func, tensors)):
            result = func(*args, **kwargs)
            return result, work_of(func, args, kwargs, result)
        known = self._known.get(key)
        if known is None and func is _SELECT and not kwargs:
            known = self._known[key] = _selection(*args)
        if known is None:
            result = func(*args, **kwargs)
            work = work_of(func, args, kwargs, result)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _outcome(result, tensors, work)
            return result, work
        if known.outputs is None:
            return func(*args, **kwargs), known.work
        made = [None if output is None else self._tensor(output, tensors) for output in known.outputs]
        return (made[0] if known.container is None else known.container(made)), known.work

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func(*args, **kwargs)` without values, as `values.KnownValues` needs it."""
        return self.call(func, args, kwargs, keeps_values=False)[0]

    def _tensor(self, output: _Output, tensors: list[FakeTensor]) -> torch.Tensor:
        if output.same:
            return tensors[output.of]
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
            if output.of != _FRESH:
                shared = tensors[output.of]
                offset = shared.storage_offset() + output.offset
                bare.set_(shared.untyped_storage(), offset, output.shape, output.stride)
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is not self._mode:
            self._mode = mode
            self._attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), _CPU)))
        made: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made


@cache
def _is_predictable(func: Any) -> bool:
    """Whether the shapes of an operator's arguments decide those of its results."""
    return (
        func.namespace == "aten"
        and (func is _INDEX or not _UNPREDICTABLE & set(func.tags))
        and not func._schema.name.startswith("aten::lift")
    )


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Any:
    """A key that is equal for calls with results of the same shapes; None if there is none. Appends the arguments that are tensors."""
    parts: list[Any] = [func, torch.get_default_dtype()]
    if func in _INDEPENDENT_OF_LAST and not kwargs:
        args = args[:-1]
    try:
        _describe(args, parts, tensors)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                _describe((value,), parts, tensors)
    except _Unknown:
        return None
    shares = False
    if len(tensors) > 1:
        storages = [t.untyped_storage()._cdata for t in tensors]
        shares = len(set(storages)) < len(storages)
    if shares:
        parts.append(tuple(storages.index(storage) for storage in storages))
    if shares or func in _AT_AN_OFFSET:
        parts.append(tuple(t.storage_offset() for t in tensors))
    if func is _INDEX and any(t.dtype in _MASKS for t in tensors[1:]):
        return None
    return tuple(parts)


class _Unknown(Exception):
    """An argument that no key describes."""


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


def _describe(values: Any, parts: list[Any], tensors: list[FakeTensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                raise _Unknown
            parts += (value.shape, value.stride(), value.dtype)
            tensors.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _describe(value, parts, tensors)
        elif kind in _PLAIN:
            parts += (kind, value)  # True == 1 == 1.0
        else:
            raise _Unknown


def _outcome(result: Any, tensors: list[FakeTensor], work: Work) -> Outcome:
    container = type(result) if isinstance(result, (list, tuple)) else None
    outputs = [_output(value, tensors) for value in ([result] if container is None else result)]
    known = container in (None, list, tuple) and all(output is not False for output in outputs)
    return Outcome(container, tuple(outputs) if known else None, work)  # type: ignore[arg-type]  # no element is False here


def _selection(tensor: FakeTensor, dim: int, index: int) -> Outcome:
    """The outcome of `select`. A loop over experts calls it with each index, and a call on PyTorch's fake tensors is slow."""
    dim %= tensor.dim()
    shape, stride = tuple(tensor.shape), tensor.stride()
    offset = index % shape[dim] * stride[dim]
    kept = _Output(
        shape[:dim] + shape[dim + 1 :], stride[:dim] + stride[dim + 1 :], offset, tensor.dtype, 0, same=False
    )
    return Outcome(None, (kept,), NONE)


def _output(value: Any, tensors: list[FakeTensor]) -> _Output | bool | None:
    """The description of one element of a result; False if the element cannot be made again from it."""
    if value is None:
        return None
    for number, tensor in enumerate(tensors):
        if value is tensor:
            return _Output((), (), 0, value.dtype, number, same=True)
    if type(value) is not FakeTensor or value.constant is not None or value.fake_device != _CPU:
        return False
    if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.requires_grad:
        return False
    storage = value.untyped_storage()
    of = next((n for n, t in enumerate(tensors) if t.untyped_storage()._cdata == storage._cdata), _FRESH)
    if of == _FRESH and (value.storage_offset() or storage.nbytes() != _span_bytes(value)):
        return False
    offset = int(value.storage_offset()) - (0 if of == _FRESH else int(tensors[of].storage_offset()))
    return _Output(tuple(value.shape), value.stride(), offset, value.dtype, of, same=False)


def _span_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the smallest storage for the elements of this tensor."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
