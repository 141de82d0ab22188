"""The selection of the cases that have their turn on a day."""

from __future__ import annotations

from math import gcd

import matrix
import pytest


def seen(count: int, days: int, on: range, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those of `count` cases that have their turn on these days. A parametrized test without a case would be skipped, which CI refuses."""
    monkeypatch.setattr(matrix, "ALL", False)
    found: set[int] = set()
    for day in on:
        monkeypatch.setattr(matrix, "DAY", day)
        today = matrix.of_today(range(count), days)
        assert today
        found |= set(today)
    return found


@pytest.mark.parametrize("days", range(1, 8))
def test_every_case_has_its_turn_within_the_days(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(1, 10):
        assert seen(count, days, range(days), monkeypatch) == set(range(count))


@pytest.mark.parametrize("of", [2, 3, 4, 5])
def test_every_case_has_its_turn_in_a_test_that_takes_turns(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for days in (days for days in range(1, 8) if gcd(days, of) == 1):
        for count in range(1, 10):
            assert seen(count, days, range(0, of * days, of), monkeypatch) == set(range(count)), (days, count)


def test_one_of_the_tests_that_take_turns_runs_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(12):
        monkeypatch.setattr(matrix, "DAY", day)
        marks = [matrix.in_turn(turn, of=4).name for turn in range(4)]
        assert sorted(marks) == ["slow", "with_all_cases", "with_all_cases", "with_all_cases"]
