"""How much of a large matrix of cases the tests take: a part that covers every setting, or everything with `CASES=all`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("CASES") == "all"
with_all_cases = pytest.mark.with_all_cases
"""Marks a long test whose subject another test covers in part. It runs only with `CASES=all`."""


DAY = int(os.environ.setdefault("DAY_OF_TESTS", str(datetime.date.today().toordinal())))
"""Decides which cases have their turn. All processes of a run share it; `DAY_OF_TESTS` in the environment repeats another day's."""


def in_turn(turn: int, of: int) -> pytest.MarkDecorator:
    """Marks one of so many long tests that take turns, numbered from 0: one runs each day, and all with `CASES=all`."""
    return pytest.mark.slow if DAY % of == turn else with_all_cases


def of_today(cases: Sequence[T], days: int) -> Sequence[T]:
    """A part of the cases, which are all run within so many days, or all with `CASES=all`."""
    return cases if ALL else cases[DAY % days :: days]


def examples(count: int) -> int:
    """How many examples hypothesis tries of so many: a third, or all with `CASES=all`."""
    return count if ALL else count // 3


def taken(part: Sequence[T], more: Sequence[T], days: int = 1) -> list[T]:
    """The part, all of which is run within so many days, followed by the other cases if all are asked for."""
    return [*of_today(part, days), *(more if ALL else ())]
