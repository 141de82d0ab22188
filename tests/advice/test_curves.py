"""Curves: the largest size within a limit, and interpolation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.advice.curves import PeakVsSize, interpolate_convex, log_spaced

LINES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=4)


def bytes_of(lines: list[tuple[int, int]], size: int) -> int:
    return max(c + m * size for c, m in lines) // 8 * 8


@given(lines=LINES, limit=st.integers(0, 20_000), sizes=st.sets(st.integers(1, 900), min_size=1))
def test_largest_within_equals_exhaustive_search(lines: list[tuple[int, int]], limit: int, sizes: set[int]) -> None:
    curve = PeakVsSize(lambda size: bytes_of(lines, size))
    for within in (limit, limit // 2, 2 * limit):  # later searches reuse the points of earlier ones
        found = curve.largest_within(sorted(sizes), within)
        assert found == max((s for s in sizes if bytes_of(lines, s) <= within), default=None)


def test_a_straight_line_needs_at_most_five_points() -> None:
    computed = []

    def bytes_at(size: int) -> int:
        computed.append(size)
        return 100 + 7 * size

    assert PeakVsSize(bytes_at).largest_within(range(1, 10**6), 70_107) == 10_001
    assert len(computed) <= 5


@given(lines=LINES, sizes=st.sets(st.integers(1, 300), min_size=1))
def test_interpolation_lies_between_chord_and_neighbouring_lines(lines: list[tuple[int, int]], sizes: set[int]) -> None:
    at = sorted(sizes)
    xs = log_spaced(at, 5)
    exact = [float(max(c + m * x for c, m in lines)) for x in at]
    guessed = interpolate_convex(xs, [max(c + m * x for c, m in lines) for x in xs], at)
    assert len(guessed) == len(at)
    for x, y, truth in zip(at, guessed, exact, strict=True):
        slack = 1e-9 * max(truth, 1)
        assert x not in xs or abs(y - truth) <= slack
        if len(xs) < 3 or x > xs[-2]:
            assert y >= truth - slack  # in the last gap there is no line beyond: the chord
        else:
            assert y <= truth + slack
