"""Curves over the micro-batch or the sequence length: search for the largest size, interpolation, Pareto front."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

FRONTIER_MIN_GAIN = 0.03
"""A point of the Pareto front is at least this share faster than the one before it."""
_SECANT_STEPS = 6
"""After this many steps along the slope, bisect: a curve with corners makes the slope a bad guide."""


class PeakVsSize:
    """Peak bytes as a function of one size (micro-batch or tokens). Each point is computed once.

    A tape's sizes are polynomials of degree one in the micro-batch, so a peak is a maximum of straight lines, rounded to
    512 bytes. It practically never falls as the size grows (in the catalog by at most 0.013 %), so the secant through two points finds
    a crossing in few steps.
    """

    def __init__(self, bytes_at: Callable[[int], int]) -> None:
        self._bytes_at = bytes_at
        self._bytes: dict[int, int] = {}
        self._sizes: list[int] = []

    def __call__(self, size: int) -> int:
        if size not in self._bytes:
            self._bytes[size] = self._bytes_at(size)
            insort(self._sizes, size)
        return self._bytes[size]

    def largest_within(self, sizes: Sequence[int], limit: int) -> int | None:
        """The largest of `sizes` (ascending) that needs at most `limit` bytes; None if none does.

        >>> PeakVsSize(lambda b: 100 + 7 * b).largest_within(range(1, 1000), 500)
        57
        """
        low, high = self._bracket(sizes, limit)
        steps = 0
        while high - low > 1:
            steps += 1
            if steps > _SECANT_STEPS and high < len(sizes):
                at = (low + high) // 2
            else:
                at = self._secant(sizes, low, high, limit)
            if self(sizes[at]) <= limit:
                low = at
            else:
                high = at
        return sizes[low] if low >= 0 else None

    def _bracket(self, sizes: Sequence[int], limit: int) -> tuple[int, int]:
        """Index of the largest size known to be within the limit (-1: none) and of the smallest known to exceed it."""
        within = [size for size in self._sizes if self._bytes[size] <= limit]
        above = self._sizes[len(within)] if len(within) < len(self._sizes) else None
        low = bisect_right(sizes, within[-1]) - 1 if within else -1
        high = bisect_left(sizes, above) if above is not None else len(sizes)
        return low, max(high, low + 1)

    def _secant(self, sizes: Sequence[int], low: int, high: int, limit: int) -> int:
        """Index at which the line through the two nearest known points crosses the limit."""
        if low < 0:
            return 0
        near = self._sizes[max(0, bisect_right(self._sizes, sizes[low]) - 2) :][:2]
        if high < len(sizes) and sizes[high] in self._bytes:
            near = [sizes[low], sizes[high]]
        if len(near) < 2 or near[0] == near[1]:
            return low + 1
        a, b = near
        slope = (self(b) - self(a)) / (b - a)
        if slope <= 0:
            return (low + high) // 2 if high < len(sizes) else min(2 * low + 1, high - 1)
        reach = int(a + (limit - self(a)) / slope)
        return min(max(bisect_right(sizes, reach) - 1, low + 1), high - 1)


def interpolate_convex(xs: Sequence[int], ys: Sequence[float], at: Sequence[int]) -> list[float]:
    """Values of a rising convex curve at the ascending positions `at`, which lie within `xs`.

    Between two points the curve is assumed to follow the lines through the neighbouring pairs of points, up to their intersection, but
    never to lie above the chord.

    >>> interpolate_convex([1, 2, 8, 9], [5, 5, 8, 9], [1, 2, 4, 5, 6, 8, 9])
    [5, 5.0, 5.0, 5.0, 6.0, 8.0, 9.0]
    """
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(zip(xs, ys, strict=True))]
    values: list[float] = []
    start = bisect_right(at, xs[0])
    values += [ys[0]] * start
    for i, (low, high) in enumerate(pairwise(xs)):
        stop = bisect_right(at, high)
        y, end, slope = ys[i], ys[i + 1], slopes[i]
        before = slopes[i - 1] if i else 0.0
        after = slopes[i + 1] if i + 1 < len(slopes) else slope
        for x in at[start:stop]:
            lowest = max(y + (x - low) * before, end - (high - x) * after)
            values.append(min(y + (x - low) * slope, lowest))
        start = stop
    return values


def pareto_front(items: Iterable[T], gain: Callable[[T], float]) -> list[T]:
    """The items, given in order of cost, that gain at least FRONTIER_MIN_GAIN over all cheaper ones.

    >>> pareto_front([0, 5, 4, 5.1, 9], float)
    [5, 9]
    """
    front: list[T] = []
    best = 0.0
    for item in items:
        if gain(item) > best * (1 + FRONTIER_MIN_GAIN):
            front.append(item)
            best = gain(item)
    return front


def log_spaced(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of `sizes` (ascending): the first, the last, and some between in equal ratios.

    >>> log_spaced(range(1, 101), 5)
    [1, 3, 10, 31, 100]
    """
    if len(sizes) <= count:
        return list(sizes)
    low, high = sizes[0], sizes[-1]
    marks = [low * (high / low) ** (i / (count - 1)) for i in range(1, count - 1)]
    inner = [sizes[bisect_right(sizes, int(mark)) - 1] for mark in marks]
    return sorted({low, *inner, high})
