"""Recorded steps at single (B, T) points, and the fit of several of them into one tape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.model.tape import (
    Category,
    Chunked,
    Divided,
    Op,
    Parts,
    Quantity,
    Recomputed,
    Segment,
    Size,
    Staging,
    Tape,
    TapePhase,
    Tiled,
    total,
    value_at,
)
from fsdp_advisor.recording.fit import fit, fit_terms
from fsdp_advisor.recording.operators import NONE, Work


@dataclass
class RawSegment:
    """The events and the work of one layer, or of the modules outside of layers, in one phase of a step."""

    phase: TapePhase
    stack: int
    layer: int
    events: list[tuple[int, int, int]] = field(default_factory=list)  # ALLOC: (storage, 0); FREE: (storage, 0)
    work: list[Work] = field(default_factory=list)  # one for each operator with work
    recomputed: list[Work] | None = None  # the part of `work` that repeats a forward
    host_copies: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RawStorage:
    """A storage of one step. `phase` is the phase that allocates it, `size` its bytes.

    `size` has another meaning in three cases: the sum's rows for the workspace of a sum (`columns` is set), 0 for a `tiled` storage, and
    the bytes of one part if `parts` is set.
    """

    size: int
    category: int
    phase: TapePhase
    columns: int | None = None
    tiled: Tiled | None = None
    parts: Parts | None = None

    def outlives_phase(self) -> None:
        """Note that the storage outlives the phase that allocated it. It then counts as an activation instead of a temporary."""
        if self.category == Category.TEMPORARY:
            self.category = Category.ACTIVATION


@dataclass
class RawStep:
    """A recorded step at one micro-batch B and length T. Storages are in order of allocation."""

    segments: list[RawSegment]
    storages: list[RawStorage]

    @property
    def columns(self) -> list[int]:
        """The columns of each sum's workspace."""
        return [s.columns for s in self.storages if s.columns is not None]

    @property
    def works(self) -> list[list[Work]]:
        """The work of each segment, then the recomputed part of each segment that has one."""
        return [s.work for s in self.segments] + [s.recomputed for s in self.segments if s.recomputed is not None]

    @property
    def bytes(self) -> list[int]:
        """The values, apart from work, that polynomials must reproduce: the sizes of storages, workspaces and copies."""
        copies = [n for s in self.segments for n in s.host_copies]
        return [s.size for s in self.storages] + self.columns + copies

    @property
    def totals(self) -> list[int]:
        """All values that polynomials must reproduce: `bytes`, and the total work of each segment."""
        return self.bytes + [n for works in self.works for n in quantities(sum(works, NONE))]


def quantities(work: Work) -> tuple[int, int, int]:
    """The FLOPs of matrix products, the FLOPs of attention and the bytes of traffic."""
    return work.matmul_flops, work.attention_flops, work.traffic_bytes


def storages_of(raw_step: RawStep) -> object:
    """The order of allocations and frees as a comparable value, without sizes and without marks of modules."""
    return (
        [(s.category, s.columns is None, s.tiled, s.parts) for s in raw_step.storages],
        [
            (
                s.phase,
                s.stack,
                s.layer,
                [e for e in s.events if e[0] <= Op.FREE],
                operators(s.work),
                None if s.recomputed is None else operators(s.recomputed),
                len(s.host_copies),
            )
            for s in raw_step.segments
        ],
    )


def operators(works: list[Work]) -> int:
    """The number of operators in all works."""
    return sum(work.operators for work in works)


def frees_in_order(events: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The events, with storages that are freed together sorted by birth. (Autocast frees its cache in the order of addresses, which
    varies.)
    """
    ordered: list[tuple[int, int, int]] = []
    for are_frees, group in groupby(events, key=lambda event: event[0] == Op.FREE):
        together = list(group)
        ordered += sorted(together) if are_frees else together
    return ordered


@dataclass(frozen=True)
class Fitted:
    """The polynomials of a tape: the sizes of all storages in order of allocation, the columns of the workspaces of sums, the bytes of
    copies to and from the host, and the work (`RawStep.works`).
    """

    storages: tuple[Quantity, ...]
    columns: tuple[Quantity, ...]
    host_copies: tuple[Quantity, ...]
    work: tuple[tuple[Quantity, Quantity, Quantity], ...]

    @property
    def all(self) -> list[Quantity]:
        return [
            *self.storages,
            *self.columns,
            *self.host_copies,
            *(quantity for work in self.work for quantity in work),
        ]

    @property
    def chunks(self) -> set[int]:
        """The tokens of the chunks on which a quantity depends."""
        return {quantity.chunk for quantity in self.all if isinstance(quantity, Chunked)}

    def at(self, b: int, t: int) -> list[int]:
        return [value_at(quantity, b, t) for quantity in self.all]


def fit_raw_steps(
    raw_steps: list[RawStep], check: RawStep, bs: tuple[int, ...], ts: tuple[int, ...], at: tuple[int, int]
) -> Fitted:
    """Polynomials through recordings at the grid of points `bs` x `ts`. Raises NotPolynomial if there are none, or if they do not
    reproduce exactly the recording `check`, which was made at the point `at`.
    """
    check_order([*raw_steps, check])
    t0, t1, t2 = ts
    polynomials = [fit(bs, (t0, t1, t2), values) for values in zip(*(t.totals for t in raw_steps), strict=True)]
    fitted = _fitted(raw_steps[0], polynomials)
    for expected, found in zip(check.totals, fitted.at(*at), strict=True):
        if expected != found:
            raise NotPolynomial(f"a size at B = {at[0]}, T = {at[1]} is {expected}, but its polynomial gives {found}")
    return fitted


def fit_confirmed(raw_steps: dict[tuple[int, int], RawStep], chunks: tuple[int, ...] = ()) -> Fitted | None:
    """Fit each size, and the work of each operator, to recordings at three or more points, with few terms each (`fit_terms`). None if one
    of them needs more terms.
    """
    points, found = tuple(raw_steps), list(raw_steps.values())
    totals = [fit_terms(points, values, chunks) for values in zip(*(raw_step.bytes for raw_step in found), strict=True)]
    for works in zip(*(raw_step.works for raw_step in found), strict=True):
        if len({len(work) for work in works}) > 1:
            return None
        for number in range(len(quantities(NONE))):
            values = zip(*([quantities(one)[number] for one in work] for work in works), strict=True)
            terms = [fit_terms(points, value, chunks) for value in values]
            totals.append(None if None in terms else total(term for term in terms if term is not None))
    known = [quantity for quantity in totals if quantity is not None]
    return _fitted(found[0], known) if len(known) == len(totals) else None


def constant(raw_step: RawStep) -> Fitted:
    """The sizes of one recording, which are valid at its own (B, T)."""
    return _fitted(raw_step, [(value, 0, 0, 0, 0, 0) for value in raw_step.totals])


def is_equal(one: RawStep, other: RawStep) -> bool:
    """Whether two steps at one (B, T) have the same events in the same order, with the same sizes and work."""
    return storages_of(one) == storages_of(other) and one.totals == other.totals


def check_order(raw_steps: Sequence[RawStep]) -> None:
    """Raise NotPolynomial unless all recorded steps have the same events in the same order."""
    if any(storages_of(raw_step) != storages_of(raw_steps[0]) for raw_step in raw_steps):
        raise NotPolynomial("the order of allocations depends on batch or length")


def _fitted(raw_step: RawStep, totals: Sequence[Quantity]) -> Fitted:
    """The polynomials `totals`, one for each of `raw_step.totals`, divided into the fields of `Fitted`."""
    births = len(raw_step.storages)
    ends = births + len(raw_step.columns)
    copies = ends + sum(len(s.host_copies) for s in raw_step.segments)
    rest = totals[copies:]
    work = tuple(zip(rest[0::3], rest[1::3], rest[2::3], strict=True))
    return Fitted(tuple(totals[:births]), tuple(totals[births:ends]), tuple(totals[ends:copies]), work)


def tape_of(raw_step: RawStep, fitted: Fitted) -> Tape:
    """The events of a recorded step, with fitted sizes."""
    columns = iter(fitted.columns)
    sizes = [_size(storage, size, columns) for storage, size in zip(raw_step.storages, fitted.storages, strict=True)]
    table = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
    home: dict[int, tuple[int, int]] = {}
    segments = []
    again_of, copies = iter(fitted.work[len(raw_step.segments) :]), iter(fitted.host_copies)
    for number, (raw, work) in enumerate(zip(raw_step.segments, fitted.work, strict=False)):
        events = []
        births = 0
        for op, a, b in raw.events:
            if op == Op.ALLOC:
                home[a] = (number, births)
                births += 1
                events.append((int(op), table[sizes[a]], int(raw_step.storages[a].category)))
            elif op == Op.FREE:
                events.append((int(op), *home[a]))
            else:
                events.append((int(op), a, b))
        again = None if raw.recomputed is None else Recomputed(*next(again_of), operators(raw.recomputed))
        segments.append(
            Segment(
                raw.phase,
                raw.stack,
                raw.layer,
                tuple(events),
                *work,
                operators(raw.work),
                again,
                tuple(islice(copies, len(raw.host_copies))),
            )
        )
    return Tape(tuple(table), tuple(segments))


def _size(storage: RawStorage, size: Quantity, columns: Iterator[Quantity]) -> Size:
    """The size of a storage on a tape. `columns`: the fitted columns of the sums' workspaces that are still to come, in order."""
    if storage.tiled is not None:
        return storage.tiled
    if storage.columns is not None:
        return Staging(size, next(columns))
    return size if storage.parts is None else Divided(size, *storage.parts)
