"""Recognizes equal values of tensors by the operators that made them.

The layers of a model, and its recordings, choose experts in the same way and search the same masks: LongCat-Flash searches one of 150 MB
for the tokens of each of 768 experts. `values.KnownValues` keeps the results here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fsdp_advisor.recording.storages import tensors_in

_MOST, _LARGEST = 5_000, 16 << 10
"""The largest number of descriptions and of results that are kept, and the largest result in bytes."""


@dataclass
class Contents:
    """Numbers for the values of storages, and results of operators that search values. A description (`made_by`) is equal only for
    equal values; None describes nothing.
    """

    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=count)
    _found: dict[Hashable, Any] = field(default_factory=dict)

    def number(self, made_by: Hashable = None) -> int:
        """The number of the values that `made_by` describes. Storages with equal numbers have equal values."""
        known = self._numbers.get(made_by)
        if known is None:
            known = next(self._next)
            _keep(self._numbers, made_by, known)
        return known

    def find(self, made_by: Hashable, find: Callable[[], Any]) -> Any:
        """The result of `find()`, kept if it is small."""
        found = self._found.get(made_by)
        if found is None:
            found = find()
            if sum(tensor.nbytes for tensor in tensors_in(found)) <= _LARGEST:
                _keep(self._found, made_by, found)
        return found


def _keep(kept: dict[Hashable, Any], made_by: Hashable, value: Any) -> None:
    if made_by is not None:
        if len(kept) >= _MOST:
            kept.clear()
        kept[made_by] = value
