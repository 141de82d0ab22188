"""The course of a step, written down once and followed at any (B, T).

What a schedule does, and in which order it meets a tape's stretches, does not depend on the batch or the sequence. So a plan's
step is replayed once, into a `Ledger`. What comes of it is a list of moments at which the step may be at its highest: each is a
constant, what the schedule has alive, and a sum over the stretches before it. At a (B, T) every stretch is a number, and the
highest of those sums is the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add

from fsdp_advisor.memory.ledger import PHASES, SLOTS, Ledger, Live, Moment, Point, Repeated, Spot
from fsdp_advisor.memory.score import Sized, picker

Pick = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Course:
    """A ledger, ready to be added up at any (B, T).

    Its rows are numbers by entry: of each stretch, then zero, then of each of `repeated`; `entries` picks from these what comes
    one after the other. By moment: `totals` are the constants, `before` picks the sum of the entries before it, `rises` how much
    higher the stretch that follows goes, and `further` what the repetitions between have left, out of `runs`, where it is in one.
    """

    moments: tuple[Moment, ...]
    entries: tuple[int, ...]
    repeated: tuple[Repeated, ...]
    spans: tuple[tuple[str, int, int], ...]
    points: tuple[tuple[Spot, int, int, int, int], ...]
    resident: tuple[int, ...]
    left: tuple[int, ...]
    totals: tuple[int, ...]
    pick: Pick
    before: Pick
    rises: Pick
    further: Pick | None
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ledger: Ledger, stretches: int) -> Course:
        """`stretches` is the number of the tape's."""
        moments = ledger.moments
        runs: dict[tuple[int, int], int] = {}
        further = [
            0 if m.run is None or not m.repeats else runs.setdefault((m.run, m.repeats), len(runs) + 1) for m in moments
        ]
        return cls(
            moments=tuple(moments),
            entries=tuple(ledger.entries),
            repeated=tuple(ledger.repeated),
            spans=tuple(ledger.spans),
            points=tuple(ledger.points),
            resident=tuple(ledger.resident),
            left=tuple(ledger.live),
            totals=tuple([m.total for m in moments]),
            pick=picker([e if e >= 0 else stretches + 1 + ~e for e in ledger.entries]),
            before=picker([m.at for m in moments]),
            rises=picker([stretches if m.stretch is None else m.stretch for m in moments]),
            further=picker(further) if runs else None,
            runs=tuple(runs),
        )


class Followed:
    """A course at one (B, T): what is alive on rank 0 at the highest, and how high each phase goes. Bytes."""

    def __init__(self, course: Course, sized: Sized) -> None:
        self._course, self._sized = course, sized
        row = [*sized.net, 0]
        for repeated in course.repeated:
            if repeated.accounts is None:
                row.append(sum([row[self._at(entry)] * times for entry, times in repeated.entries]))
            else:
                row.append(sum(self._by_account([(~(len(row) - len(sized.net) - 1), 1)])))
        sums = (0, *accumulate(course.pick(row)))
        highs = map(add, course.totals, map(add, course.before(sums), course.rises((*sized.high, 0))))
        if course.further is not None:
            highs = map(add, highs, course.further((0, *(row[self._at(run)] * times for run, times in course.runs))))
        self._sums, self._highs = sums, tuple(highs)
        self.peak: int = max(self._highs)
        self._highest = course.moments[self._highs.index(self.peak)]
        self.peak_phase, self.peak_where = self._highest.spot
        self.phase_peaks = dict.fromkeys(PHASES, 0)
        for phase, begun, end in course.spans:
            self.phase_peaks[phase] = max((self.phase_peaks[phase], *self._highs[begun:end]))

    @cached_property
    def at_peak(self) -> Live:
        """What is alive then, by account; the first time, if there are several."""
        course, m = self._course, self._highest
        live = self._by_account(Counter(course.entries[: m.at]).items())
        if m.run is not None:
            live = _sum(live, self._by_account([(m.run, m.repeats)]))
        if m.stretch is not None:
            for account, n_bytes in self._sized.highest_by_account(m.stretch).items():
                live[account] += n_bytes
        return _sum(live, m.live)

    @property
    def resident(self) -> Live:
        """What is alive whenever a step begins, by account."""
        return list(self._course.resident)

    @property
    def live(self) -> Live:
        """What is alive when the step is over, by account."""
        return _sum(self._by_account(Counter(self._course.entries).items()), self._course.left)

    @property
    def timeline(self) -> tuple[Point, ...]:
        """The step in stretches, for a course with every moment (`Ledger.whole`)."""
        result = []
        for (_, at, total, begun, _), (spot, entries, live, end, repeats) in pairwise(self._course.points):
            if repeats:
                high = max((self._sums[at] + total, *self._highs[begun:end]))
                result.append(Point(*spot, self._sums[entries] + live, high, repeats))
        return tuple(result)

    def _at(self, entry: int) -> int:
        return entry if entry >= 0 else len(self._sized.net) + 1 + ~entry

    def _by_account(self, entries: Iterable[tuple[int, int]]) -> Live:
        live = [0] * SLOTS
        for entry, times in entries:
            if entry >= 0:
                for account, n_bytes in self._sized.net_by_account(entry).items():
                    live[account] += n_bytes * times
                continue
            repeated = self._course.repeated[~entry]
            inner = self._by_account(repeated.entries)
            for account in range(SLOTS) if repeated.accounts is None else repeated.accounts:
                live[account] += inner[account] * times
        return live


def _sum(one: Sequence[int], other: Sequence[int]) -> Live:
    return list(map(add, one, other))
