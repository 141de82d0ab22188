"""Recordings of one step (takes), and the fit of takes at several (B, T) points into one tape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.model.tape import Op, Polynomial, Recomputed, Segment, Size, Staging, Tape, Tiled, evaluate
from fsdp_advisor.recording.fit import fit
from fsdp_advisor.recording.operators import Work


@dataclass
class RawSegment:
    phase: str
    stack: int
    layer: int
    events: list[tuple[int, int, int]] = field(default_factory=list)  # ALLOC: (storage, 0); FREE: (storage, 0)
    work: Work = field(default_factory=Work)
    recomputed: Work | None = None  # the part of it that repeats a forward
    host_copies: list[int] = field(default_factory=list)


@dataclass
class Take:
    """One recorded step at one point."""

    segments: list[RawSegment]
    sizes: list[int]  # by storage, in order of birth; for a sum's workspace: its rows
    categories: list[int]  # by storage
    columns: dict[int, int]  # by storage of a sum's workspace: its columns
    tiled: dict[int, Tiled] = field(default_factory=dict)  # by storage of a loss's tile, whose size above is 0

    @property
    def works(self) -> list[Work]:
        """The work of each segment, then the recomputed part of each segment that has one."""
        return [s.work for s in self.segments] + [s.recomputed for s in self.segments if s.recomputed is not None]

    @property
    def totals(self) -> list[int]:
        """All values that polynomials must reproduce."""
        return (
            self.sizes
            + list(self.columns.values())
            + [n for s in self.segments for n in s.host_copies]
            + [n for w in self.works for n in (w.matmul_flops, w.attention_flops, w.traffic_bytes)]
        )


def storages_of(take: Take) -> object:
    """A take's allocations and frees in order, without sizes and marks, for comparison."""
    return (
        take.categories,
        list(take.columns),
        take.tiled,
        [
            (
                s.phase,
                s.stack,
                s.layer,
                [e for e in s.events if e[0] <= Op.FREE],
                s.work.operators,
                _repeated(s),
                len(s.host_copies),
            )
            for s in take.segments
        ],
    )


def _repeated(segment: RawSegment) -> int | None:
    return None if segment.recomputed is None else segment.recomputed.operators


@dataclass(frozen=True)
class Fitted:
    """Polynomials of all storages in order of birth, of the columns of sums' workspaces, of copies to and from the host, and of `Take.works`."""

    storages: tuple[Polynomial, ...]
    columns: tuple[Polynomial, ...]
    host_copies: tuple[Polynomial, ...]
    work: tuple[tuple[Polynomial, Polynomial, Polynomial], ...]

    def at(self, b: int, t: int) -> list[int]:
        return [
            evaluate(p, b, t)
            for p in (*self.storages, *self.columns, *self.host_copies, *(p for w in self.work for p in w))
        ]


def fit_takes(takes: list[Take], check: Take, bs: tuple[int, ...], ts: tuple[int, ...], at: tuple[int, int]) -> Fitted:
    """Polynomials through recordings at the grid points. Raises NotPolynomial if there are none, or if they do not reproduce the
    recording `check` at `at` exactly.
    """
    check_order([*takes, check])
    t0, t1, t2 = ts
    polynomials = [fit(bs, (t0, t1, t2), values) for values in zip(*(t.totals for t in takes), strict=True)]
    fitted = _fitted(takes[0], polynomials)
    for expected, found in zip(check.totals, fitted.at(*at), strict=True):
        if expected != found:
            raise NotPolynomial(f"a size at B = {at[0]}, T = {at[1]} is {expected}, but its polynomial gives {found}")
    return fitted


def constant(take: Take) -> Fitted:
    """The sizes of one recording, which are valid at its own (B, T)."""
    return _fitted(take, [(value, 0, 0, 0, 0, 0) for value in take.totals])


def check_order(takes: Sequence[Take]) -> None:
    """Raise NotPolynomial unless all takes have the same events in the same order."""
    if any(storages_of(take) != storages_of(takes[0]) for take in takes):
        raise NotPolynomial("the order of allocations depends on batch or length")


def _fitted(take: Take, totals: Sequence[Polynomial]) -> Fitted:
    """`totals`: a polynomial for each of the take's totals."""
    births = len(take.sizes)
    ends = births + len(take.columns)
    copies = ends + sum(len(s.host_copies) for s in take.segments)
    rest = totals[copies:]
    work = tuple(zip(rest[0::3], rest[1::3], rest[2::3], strict=True))
    return Fitted(tuple(totals[:births]), tuple(totals[births:ends]), tuple(totals[ends:copies]), work)


def tape_of(take: Take, fitted: Fitted) -> Tape:
    """The events of a take with fitted sizes."""
    sizes: list[Size] = list(fitted.storages)
    for storage, columns in zip(take.columns, fitted.columns, strict=True):
        sizes[storage] = Staging(fitted.storages[storage], columns)
    for storage, tiled in take.tiled.items():
        sizes[storage] = tiled
    table = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
    home: dict[int, tuple[int, int]] = {}
    segments = []
    parts, copies = iter(fitted.work[len(take.segments) :]), iter(fitted.host_copies)
    for number, (raw, work) in enumerate(zip(take.segments, fitted.work, strict=False)):
        events = []
        births = 0
        for op, a, b in raw.events:
            if op == Op.ALLOC:
                home[a] = (number, births)
                births += 1
                events.append((int(op), table[sizes[a]], take.categories[a]))
            elif op == Op.FREE:
                events.append((int(op), *home[a]))
            else:
                events.append((int(op), a, b))
        again = None if raw.recomputed is None else Recomputed(*next(parts), raw.recomputed.operators)
        segments.append(
            Segment(
                raw.phase,
                raw.stack,
                raw.layer,
                tuple(events),
                *work,
                raw.work.operators,
                again,
                tuple(islice(copies, len(raw.host_copies))),
            )
        )
    return Tape(tuple(table), tuple(segments))
