"""Scores: what is left out of a stretch changes neither how high it rises nor what it leaves, whatever the sizes are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.memory.score import Balance, Change, between_heights

CHANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([-2, -1, 1])), min_size=1)
SIZES = st.lists(st.integers(0, 5), min_size=4, max_size=4)


def _walked(changes: list[Change], sizes: list[int]) -> tuple[int, Counter[int], Counter[int]]:
    """How high it goes, what each account has there the first time, and in the end."""
    highest, level, live = 0, 0, Counter[int]()
    there = live.copy()
    for account, size, times in changes:
        live[account] += times * sizes[size]
        level += times * sizes[size]
        if level > highest:
            highest, there = level, live.copy()
    return highest, +there, live


@given(CHANGES, SIZES)
def test_a_stretch_rises_as_high_and_leaves_the_same(changes: list[Change], sizes: list[int]) -> None:
    fewer = between_heights(changes)
    assert len(fewer) <= len(changes)
    highest, there, left = _walked(fewer, sizes)
    wanted = _walked(changes, sizes)
    assert (highest, there) == wanted[:2]
    assert {a: n for a, n in left.items() if n} == {a: n for a, n in wanted[2].items() if n}


@given(CHANGES, SIZES)
def test_a_balance_is_what_changes_come_to(changes: list[Change], sizes: list[int]) -> None:
    numbers, by_account = Counter[tuple[int, int]](), Counter[int]()
    for account, size, times in changes:
        numbers[account, size] += times
    for account, n_bytes in Balance(numbers).at(sizes):
        by_account[account] += n_bytes
    left = _walked(changes, sizes)[2]
    assert {a: n for a, n in by_account.items() if n} == {a: n for a, n in left.items() if n}
