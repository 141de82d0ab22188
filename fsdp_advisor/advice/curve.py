"""Bytes as a function of one number that only makes them grow (micro-batch, tokens), known where they were asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

_HINTED = 2
_GUESSES = 6
"""After as many guesses from the slope, halve: a guess gains little where the curve bends."""


class Curve:
    """Peak bytes over the micro-batch (or over tokens), all else being fixed.

    Every size on a tape is a polynomial with one degree in the micro-batch, so a peak is a maximum of straight lines (up to
    rounding to 512 bytes): it does not fall (over the catalog by at most 0.013 %, where allocations change places), and from
    two points of a line the next crossing is met at once. One point costs a replay, and is remembered for the next limit.
    """

    def __init__(self, bytes_at: Callable[[int], int]) -> None:
        self._bytes_at = bytes_at
        self._at: dict[int, int] = {}
        self._known: list[int] = []

    def __call__(self, size: int) -> int:
        if size not in self._at:
            self._at[size] = self._bytes_at(size)
            insort(self._known, size)
        return self._at[size]

    @property
    def points(self) -> list[tuple[int, int]]:
        """What is known, ascending."""
        return [(size, self._at[size]) for size in self._known]

    def largest_within(self, sizes: Sequence[int], limit: int, hint: int | None = None) -> int | None:
        """The largest of `sizes` (ascending) whose bytes are at most `limit`; None where none is.

        `hint` is where a curve like this one had its answer: it saves guesses, and changes nothing else.

        >>> Curve(lambda b: 100 + 7 * b).largest_within(range(1, 1000), 500)
        57
        """
        low, high = self._bracket(sizes, limit)
        guesses = 0
        near = bisect_right(sizes, hint) - 1 if hint is not None else -1
        while high - low > 1:
            if guesses < _HINTED and low < near < high:
                at = near
            elif guesses < _HINTED and low == near < len(sizes) - 1:
                at = near + 1
            elif guesses > _GUESSES and high < len(sizes):
                at = (low + high) // 2
            else:
                at = self._guess(sizes, low, high, limit)
            guesses += 1
            if self(sizes[at]) <= limit:
                low = at
            else:
                high = at
        return sizes[low] if low >= 0 else None

    def _bracket(self, sizes: Sequence[int], limit: int) -> tuple[int, int]:
        """Indices between which the answer lies, by what is known."""
        fitting = [size for size in self._known if self._at[size] <= limit]
        over = self._known[len(fitting)] if len(fitting) < len(self._known) else None
        low = bisect_right(sizes, fitting[-1]) - 1 if fitting else -1
        high = bisect_left(sizes, over) if over is not None else len(sizes)
        return low, max(high, low + 1)

    def _guess(self, sizes: Sequence[int], low: int, high: int, limit: int) -> int:
        """Where the line through the two nearest known points meets the limit."""
        if low < 0:
            return 0
        near = self._known[max(0, bisect_right(self._known, sizes[low]) - 2) :][:2]
        if high < len(sizes) and sizes[high] in self._at:
            near = [sizes[low], sizes[high]]
        if len(near) < 2 or near[0] == near[1]:
            return low + 1
        a, b = near
        slope = (self(b) - self(a)) / (b - a)
        if slope <= 0:
            return (low + high) // 2 if high < len(sizes) else min(2 * low + 1, high - 1)
        reach = int(a + (limit - self(a)) / slope)
        return min(max(bisect_right(sizes, reach) - 1, low + 1), high - 1)
