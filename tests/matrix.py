"""Selects the part of a large matrix of cases that the tests run: a part that covers every setting, or everything with `CASES=all`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("CASES") == "all"
with_all_cases = pytest.mark.with_all_cases
"""Marks a long test that runs only with `CASES=all`, because another test covers a part of its subject."""


DAY = int(os.environ.setdefault("DAY_OF_TESTS", str(datetime.date.today().toordinal())))
"""The number of the day, which selects the cases that have their turn. All processes of a run share it; set `DAY_OF_TESTS` to repeat
the tests of another day.
"""


def in_turn(turn: int, of: int) -> pytest.MarkDecorator:
    """Marks number `turn` (from 0) of `of` long tests that take turns: one of them runs each day, and all with `CASES=all`."""
    return pytest.mark.slow if DAY % of == turn else with_all_cases


def of_today(cases: Sequence[T], days: int) -> Sequence[T]:
    """The cases that have their turn today, so that all are run within `days` days; all of them with `CASES=all`. Of fewer cases than
    days, there is one each day. In a test that is run `in_turn(..., of)`, choose `days` without a divisor in common with `of`:
    otherwise some cases never have their turn.
    """
    turn = DAY % days
    return cases if ALL or not cases else cases[turn::days] or [cases[turn % len(cases)]]


def is_installed(model_type: str) -> bool:
    """Whether the installed transformers can build a type of model. The catalog has types that came with newer versions."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        from fsdp_advisor.recording.nearest import FIRST_VERSIONS
    except ImportError:
        return True  # tests that need transformers are skipped without it
    return model_type in CONFIG_MAPPING_NAMES or model_type not in FIRST_VERSIONS


def examples(count: int) -> int:
    """The number of examples that hypothesis tries: a third of `count`, or all with `CASES=all`."""
    return count if ALL else count // 3


def taken(part: Sequence[T], more: Sequence[T], days: int = 1) -> list[T]:
    """The cases of `part` that have their turn today (all are run within `days` days); with `CASES=all` the whole `part` and `more`."""
    return [*of_today(part, days), *(more if ALL else ())]
