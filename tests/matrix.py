"""How much of a large matrix of cases the tests take: a part that covers every setting, or everything with `CASES=all`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("CASES") == "all"
with_all_cases = pytest.mark.with_all_cases
"""Marks a long test whose subject another test covers in part. It runs only with `CASES=all`."""


def examples(count: int) -> int:
    """How many examples hypothesis tries of so many: a third, or all with `CASES=all`."""
    return count if ALL else count // 3


def taken(part: Sequence[T], more: Sequence[T]) -> list[T]:
    """The part, followed by the other cases if all are asked for."""
    return [*part, *(more if ALL else ())]
