"""The course of a step, written down once and followed at any (B, T).

What a schedule does, and in which order it meets a tape's stretches, does not depend on the batch or the sequence. So a plan's
step is replayed once, into a `Ledger`. What comes of it is a list of moments at which the step may be at its highest: each is a
constant, what the schedule has alive, and a sum over the stretches before it. At a (B, T) every stretch is a number, and the
highest of those sums is the peak.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import add, mul
from typing import Any, TypeVar

from fsdp_advisor.memory.ledger import PHASES, SLOTS, Ledger, Live, Point, Repeated, Spot
from fsdp_advisor.memory.score import Balance, Pick, Score, Sized, picker

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Course:
    """A ledger, ready to be added up at any (B, T).

    A row has a number for each entry: of each stretch, then zero, then of each of `repeated`; `entries` are picked from it, one
    after the other; `repeats` picks what each of `repeated` stands for and says how often it counts (None: of some accounts only,
    see `_of_entry`). By moment: `totals` are the constants, and `live`, SLOTS numbers each, the same by account; `places` say how
    many entries come before it, which stretch follows, or -1, and which of `runs` it is in, counted from 1, or 0. `before` picks
    the sum of those entries, `rises` how much higher that stretch goes, `further` what the run's repetitions have left.
    """

    entries: tuple[int, ...]
    repeated: tuple[Repeated, ...]
    repeats: tuple[tuple[Pick, tuple[int, ...]] | None, ...]
    runs: tuple[tuple[int, int], ...]
    spans: tuple[tuple[str, int, int], ...]
    points: tuple[tuple[Spot, int, int, int, int], ...]
    resident: tuple[int, ...]
    left: tuple[int, ...]
    totals: tuple[int, ...]
    live: Sequence[int]
    spots: tuple[Spot, ...]
    places: Sequence[int]
    pick: Pick
    before: Pick
    rises: Pick
    further: Pick | None

    @classmethod
    def of(cls, ledger: Ledger, stretches: int) -> Course:
        """`stretches` is the number of the tape's."""
        moments = ledger.moments
        runs: dict[tuple[int, int], int] = {}
        further = [
            0 if m.run is None or not m.repeats else runs.setdefault((m.run, m.repeats), len(runs) + 1) for m in moments
        ]
        stretch = [-1 if m.stretch is None else m.stretch for m in moments]
        known: dict[Any, Any] = {}

        def at(entry: int) -> int:
            """Where an entry stands in a row."""
            return entry if entry >= 0 else stretches + 1 + ~entry

        def once(values: Iterable[T]) -> tuple[T, ...]:
            """Values that are equal are one object."""
            return tuple([known.setdefault(value, value) for value in values])

        return cls(
            entries=tuple(ledger.entries),
            repeated=tuple(ledger.repeated),
            repeats=tuple(
                (picker([at(entry) for entry, _ in r.entries]), tuple(times for _, times in r.entries))
                if r.accounts is None
                else None
                for r in ledger.repeated
            ),
            runs=tuple(runs),
            spans=tuple(ledger.spans),
            points=tuple(ledger.points),
            resident=tuple(ledger.resident),
            left=tuple(ledger.live),
            totals=once(m.total for m in moments),
            live=_packed([n_bytes for m in moments for n_bytes in m.live]),
            spots=once(m.spot for m in moments),
            places=array("i", chain.from_iterable(zip((m.at for m in moments), stretch, further, strict=True))),
            pick=picker([at(entry) for entry in ledger.entries]),
            before=picker([m.at for m in moments]),
            rises=picker([stretches if n < 0 else n for n in stretch]),
            further=picker(further) if runs else None,
        )

    def follow(self, sized: Sized) -> Followed:
        """The step at the score's (B, T)."""
        highs = self._added_up(sized)[1]
        peak = max(highs)
        highest = highs.index(peak)
        phase, where = self.spots[highest]
        phase_peaks = dict.fromkeys(PHASES, 0)
        for span, begun, end in self.spans:
            phase_peaks[span] = max((phase_peaks[span], *highs[begun:end]))
        return Followed(
            peak=peak,
            peak_phase=phase,
            peak_where=where,
            phase_peaks=phase_peaks,
            at_peak=tuple(self._live_at(highest, sized)),
            resident=self.resident,
        )

    def timeline(self, sized: Sized) -> tuple[Point, ...]:
        """The step in stretches, of a ledger that is `whole`."""
        sums, highs = self._added_up(sized)
        result = []
        for (_, at, total, begun, _), (spot, entries, live, end, repeats) in pairwise(self.points):
            if repeats:
                high = max((sums[at] + total, *highs[begun:end]))
                result.append(Point(*spot, sums[entries] + live, high, repeats))
        return tuple(result)

    def live_after(self, sized: Sized) -> Live:
        """What is alive when the step is over, by account."""
        entries = Counter(self.entries).items()
        return _with(self.left, Balance(self.made(entries, sized.score)).at(sized.sizes))

    def made(self, entries: Iterable[tuple[int, int]], score: Score) -> Counter[tuple[int, int]]:
        """What entries come to, each as often as said: how many storages, by (account, size of the score)."""
        made: Counter[tuple[int, int]] = Counter()
        for entry, times in entries:
            if entry >= 0:
                for account, size, n in score.changes[score.distinct[entry]].left:
                    made[account, size] += n * times
                continue
            inside, accounts = self.repeated[~entry]
            for (account, size), n in self.made(inside, score).items():
                if accounts is None or account in accounts:
                    made[account, size] += n * times
        return made

    def _added_up(self, sized: Sized) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the entries come to, one after the other; and the height of every moment."""
        row = [*sized.net, 0]
        for number, repeat in enumerate(self.repeats):
            if repeat is None:
                row.append(sum(n_bytes for _, n_bytes in _of_entry(self, sized.score, ~number).at(sized.sizes)))
            else:
                pick, times = repeat
                row.append(sum(map(mul, pick(row), times)))
        sums = (0, *accumulate(self.pick(row)))
        highs = map(add, self.totals, map(add, self.before(sums), self.rises((*sized.high, 0))))
        if self.further is not None:
            first = len(sized.net) + 1  # of `repeated`, as every run is
            runs = (0, *[row[first + ~run] * times for run, times in self.runs])
            highs = map(add, highs, self.further(runs))
        return sums, tuple(highs)

    def _live_at(self, moment: int, sized: Sized) -> Live:
        """What is alive at a moment, by account."""
        live = _with(
            self.live[SLOTS * moment : SLOTS * moment + SLOTS],
            _before(self, sized.score, moment).at(sized.sizes),
        )
        stretch = self.places[3 * moment + 1]
        return live if stretch < 0 else _with(live, sized.highest_by_account(stretch))


# What does not depend on B and T either, of a moment that was the highest at some


@lru_cache(maxsize=4096)
def _before(course: Course, score: Score, moment: int) -> Balance:
    """What a tape has made before a moment."""
    at, _, run = course.places[3 * moment : 3 * moment + 3]
    entries = Counter(course.entries[:at])
    if run:
        entry, times = course.runs[run - 1]
        entries[entry] += times
    return Balance(course.made(entries.items(), score))


@lru_cache(maxsize=256)
def _of_entry(course: Course, score: Score, entry: int) -> Balance:
    """What an entry stands for."""
    return Balance(course.made([(entry, 1)], score))


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A step at one (B, T): what is alive on rank 0 at the highest, the first time, and how high each phase goes. Bytes.

    `resident` is what is alive whenever a step begins.
    """

    peak: int
    peak_phase: str
    peak_where: str
    phase_peaks: dict[str, int]
    at_peak: tuple[int, ...]
    resident: tuple[int, ...]


def _packed(values: list[int]) -> Sequence[int]:
    """Eight bytes each, where that is enough."""
    try:
        return array("q", values)
    except OverflowError:
        return values


def _with(live: Iterable[int], more: Iterable[tuple[int, int]]) -> Live:
    """Bytes by account, and others to be added to them."""
    result = list(live)
    for account, n_bytes in more:
        result[account] += n_bytes
    return result
