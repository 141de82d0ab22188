"""The search: every family at every micro-batch, without looking at each.

Three facts carry it. Bytes never fall as the micro-batch grows, so one number per family, the largest micro-batch that
fits, decides all of them (`Curve` finds it in about four replays). Every accumulation from two on has the same peak, and
adds the same seconds. And seconds grow smoothly, but for corners where one stream overtakes another, so between a few
micro-batches they are interpolated (within 6 % in the benchmark); whatever is shown is timed anew, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from fsdp_advisor.advice.batches import Batches
from fsdp_advisor.advice.families import Family, Job
from fsdp_advisor.advice.judge import Candidate, Judge
from fsdp_advisor.job.plan import Plan

T = TypeVar("T")

TIE = 0.01
"""Speeds that differ by less are alike: the time model knows no better."""

WORTH = 0.03
"""A point of the frontier is this much faster than the one before it."""

TIMED = 6
"""Micro-batches of a family that are timed; those between are interpolated, and what is shown is timed anew."""

_SHOWN = 12
"""Micro-batches of a family that are looked at for the frontier, at most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration judged: a family at a micro-batch. `rate` is tokens per second per GPU, 0 where it is not known."""

    family: Family
    micro_batch_size: int
    accumulation: int
    fits: bool
    rate: float

    @property
    def order(self) -> tuple[float, tuple[int, ...], int]:
        return (-self.rate, self.family.simplicity, -self.micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class Search:
    """All families of one job on one type of GPU."""

    judge: Judge
    job: Job
    batches: Batches
    families: tuple[Family, ...]

    @property
    def recorded(self) -> tuple[Family, ...]:
        """The families that can be looked at in bytes, not by their states alone."""
        return tuple(f for f in self.families if f not in self.judge.bytes.left_out)

    @cached_property
    def ceilings(self) -> dict[Family, int]:
        """By family, the largest micro-batch whose tensors fit; families of which none does are not in it."""
        found = {f: self.judge.ceiling(f, self.job, self.batches) for f in self.families}
        return {f: size for f, size in found.items() if size is not None}

    @cached_property
    def settled(self) -> dict[Family, int]:
        """As `ceilings`, by the best known figure."""
        found = {f: self.judge.settled(f, self.job, self.batches, size) for f, size in self.ceilings.items()}
        return {f: size for f, size in found.items() if size is not None}

    @property
    def configurations(self) -> int:
        """How many were judged: each family at each micro-batch up to the first that fits none of them."""
        sizes = self.batches.sizes
        most = max((sizes.index(size) for size in self.ceilings.values()), default=-1)
        return len(self.families) * min(most + 2, len(sizes))

    def rows(self, most: int | None = None) -> Iterator[Row]:
        """Every family at every micro-batch (the first `most` of them) with its verdict."""
        sizes = self.batches.sizes[:most]
        for family in self.families:
            reach = bisect_right(sizes, self.ceilings[family]) if family in self.ceilings else 0
            steps = [self.batches.accumulation(size) for size in sizes]
            rates = self._rates(family, sizes[:reach])
            for size, a, rate in zip(sizes[:reach], steps, rates, strict=False):
                yield Row(family, size, a, True, rate)
            for size, a in zip(sizes[reach:], steps[reach:], strict=True):
                yield Row(family, size, a, False, 0.0)

    def best(self, family: Family, ceiling: int) -> Candidate:
        """The family's fastest micro-batch up to the ceiling; of those that are alike, the roundest, then the smallest.

        Where time is not known, the largest: fewer and larger kernels, and fewer collectives.
        """
        sizes = self.batches.sizes[: self.batches.sizes.index(ceiling) + 1]
        rates = self._rates(family, sizes)
        top = max(rates)
        if top <= 0:
            chosen = sizes[-1]
        else:
            alike = [size for size, rate in zip(sizes, rates, strict=True) if rate >= (1 - TIE) * top]
            chosen = min(alike, key=lambda size: (-(size & -size), size))
        return self.at(family, chosen)

    @cached_property
    def leaders(self) -> tuple[Candidate, ...]:
        """The best of each family that fits, in order: the recommended one first."""
        found = sorted((self.best(f, size) for f, size in self.settled.items()), key=lambda c: c.order)
        if not found:
            return ()
        winner = choose(found)
        return (winner, *(c for c in found if c is not winner))

    @cached_property
    def losers(self) -> tuple[Candidate, ...]:
        """The families that do not fit even at the smallest micro-batch, at that, the simplest first."""
        return tuple(self.at(f, self.batches.smallest) for f in self.families if f not in self.settled)

    @property
    def anything_fits(self) -> bool:
        """Whether any family does; the leanest are asked first."""
        sizes = dict.fromkeys((self.batches.smallest, self.batches.wanted))  # the largest may need no accumulation
        return any(self.judge.fits(self._plan(family, size)) for family in reversed(self.families) for size in sizes)

    def at(self, family: Family, size: int) -> Candidate:
        """A family at a micro-batch."""
        return self.judge.candidate(self._plan(family, size))

    def least(self) -> Candidate:
        """Where nothing fits: what needs least."""
        return min(self.losers, key=lambda c: (c.needed_bytes or c.state_bytes, c.order))

    def frontier(self) -> tuple[Candidate, ...]:
        """Those that nothing beats in memory and speed at once, from the smallest to the fastest; none without a clock.

        Found by interpolated speeds at some micro-batches of each family, then looked at exactly.
        """
        if self.judge.model.profile is None:
            return ()
        points = []
        for family, ceiling in self.settled.items():
            sizes = self.batches.sizes[: self.batches.sizes.index(ceiling) + 1]
            rates = self._rates(family, sizes)
            curve = self.judge.bytes.curve(family, self.job, accumulating=self.batches.accumulation(sizes[0]) > 1)
            points += [(curve(size), rates[sizes.index(size)], family, size) for size in spread(sizes, _SHOWN)]
        points.sort(key=lambda p: (p[0], -p[1], p[2].simplicity, p[3]))
        looked_at = [self.at(family, size) for _, _, family, size in rising(points, lambda p: p[1])]
        looked_at.sort(key=lambda c: (c.needed_bytes, c.order))
        return tuple(rising([c for c in looked_at if c.fits], lambda c: c.tokens_per_second_per_gpu or 0.0))

    def _plan(self, family: Family, size: int) -> Plan:
        return family.plan(self.job, size, self.batches.accumulation(size))

    def _rates(self, family: Family, sizes: Sequence[int]) -> list[float]:
        """Tokens per second per GPU at each size, 0 where there is no time."""
        if not sizes:
            return []
        timed = spread(sizes, TIMED)
        accumulating = self.batches.accumulation(sizes[0]) > 1
        once = [self.judge.seconds(family.plan(self.job, size, 1)) for size in timed]
        twice = [self.judge.seconds(family.plan(self.job, size, 2)) for size in timed] if accumulating else once
        known = [(one, two - one) for one, two in zip(once, twice, strict=True) if one is not None and two is not None]
        if len(known) < len(timed):
            return [0.0] * len(sizes)
        first = bent(timed, [one for one, _ in known], sizes)
        tokens = self.job.seq_len
        if not accumulating:
            return [size * tokens / seconds for size, seconds in zip(sizes, first, strict=True)]
        rates = []
        for size, seconds, further in zip(sizes, first, bent(timed, [more for _, more in known], sizes), strict=True):
            steps = self.batches.accumulation(size)
            rates.append(size * steps * tokens / (seconds + (steps - 1) * further))
        return rates


def bent(xs: Sequence[int], ys: Sequence[float], at: Sequence[int]) -> list[float]:
    """A rising curve that bends upwards, between its known points: where the lines beside a gap meet, but not above its chord.

    Exact where a gap holds one corner. `at` is ascending, from `xs[0]` to `xs[-1]`.

    >>> bent([1, 2, 8, 9], [5, 5, 8, 9], [1, 2, 4, 5, 6, 8, 9])
    [5, 5.0, 5.0, 5.0, 6.0, 8.0, 9.0]
    """
    slopes = [(d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(xs), pairwise(ys), strict=True)]
    values = [ys[0]]
    start = 1
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


def rising(items: Iterable[T], height: Callable[[T], float]) -> list[T]:
    """Those that are higher, by WORTH, than all before them.

    >>> rising([0, 5, 4, 5.1, 9], float)
    [5, 9]
    """
    found: list[T] = []
    highest = 0.0
    for item in items:
        if height(item) > highest * (1 + WORTH):
            found.append(item)
            highest = height(item)
    return found


def spread(sizes: Sequence[int], most: int) -> list[int]:
    """The first, the last and some between, in equal ratios.

    >>> spread(range(1, 101), 5)
    [1, 3, 10, 31, 100]
    """
    if len(sizes) <= most:
        return list(sizes)
    low, high = sizes[0], sizes[-1]
    marks = [low * (high / low) ** (i / (most - 1)) for i in range(1, most - 1)]
    inner = [sizes[bisect_right(sizes, int(mark)) - 1] for mark in marks]
    return sorted({low, *inner, high})


def choose(found: Sequence[Candidate]) -> Candidate:
    """The fastest; of those within TIE of it the simplest. What takes an unusual host only where nothing else is left."""
    first = min(found, key=lambda c: c.order)
    top = first.tokens_per_second_per_gpu
    if top is None:
        return first
    alike = [
        c
        for c in found
        if c.host_unusual == first.host_unusual and (c.tokens_per_second_per_gpu or 0.0) >= (1 - TIE) * top
    ]
    return min(alike, key=lambda c: (c.family.simplicity, c.order))
