"""A tape divided into spans. A span is the events between two hooks of an engine.

A hook runs at each mark on the tape (a unit's forward or backward begins or ends, a gradient is ready). Between two hooks the
engine does nothing, so a reader needs only a span's net bytes and its peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import (
    ROOT,
    Category,
    Chunked,
    Divided,
    MarkedUnit,
    Op,
    Segment,
    Size,
    Staging,
    Tape,
    TapePhase,
    Tiled,
    value_at,
)
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.embedding_workspace import EmbeddingGradient, embedding_gradients
from fsdp_advisor.program.reduction_workspace import reduction_workspace_bytes
from fsdp_advisor.program.storages import Storages, round_up

_ACCOUNT_OF_CATEGORY = {
    int(Category.TEMPORARY): int(Account.TEMPORARIES),
    int(Category.ACTIVATION): int(Account.ACTIVATIONS),
    int(Category.LOSS): int(Account.LOSS),
    int(Category.CAST_PARAMETER): int(Account.UNSHARDED_PARAMETERS),
    int(Category.INPUT): int(Account.OTHER),
    int(Category.PARTIAL_GRADIENT): int(Account.UNSHARDED_GRADIENTS),
    int(Category.SCRATCH): int(Account.WORKSPACE),
    int(Category.DEQUANTIZED): int(Account.DEQUANTIZATION),
}
"""Any other category is a parameter's gradient."""
_GRADIENT_ACCOUNT = int(Account.UNSHARDED_GRADIENTS)
_ALLOC, _FREE, _GRADIENT = int(Op.ALLOC), int(Op.FREE), int(Category.GRADIENT)
"""Plain integers, which compare faster than enum members."""


class Change(NamedTuple):
    """Allocate `times` storages of one of the tape's sizes, or free them if `times` is negative."""

    account: int
    size: int
    times: int


class Hook(NamedTuple):
    """A place where an engine's hook runs. `a`, `b` are the event's arguments."""

    op: Op
    a: int
    b: int


class GradientBirth(NamedTuple):
    """The allocation of a parameter's gradient. `birth`: its number among the storages of the segment. `parameter`: its index in
    the layer, or in the root if it is `at_root`; in a recording of FSDP1 that of the flat parameter (`Leaf`).
    """

    birth: int
    parameter: int
    at_root: bool
    storages: Storages


class Allocated(NamedTuple):
    """A storage is allocated. `birth`: its number among those of the segment. `at`: the index of the event in the segment."""

    birth: int
    size: int
    category: int
    at: int


class Freed(NamedTuple):
    """A storage is freed: number `birth` among those allocated in `segment`. `is_near` is the result of `stays_near`."""

    segment: int
    birth: int
    size: int
    category: int
    is_near: bool


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """Events of a segment of the tape between two hooks. `number` is its index in `TapeLayout.spans`.

    `events` are the allocations and frees in one real layer. `changes` are the same by account, with the frees in all real layers.
    `gradients` are the parameter gradients allocated here.
    """

    number: int
    segment: int
    events: tuple[Allocated | Freed, ...]
    changes: tuple[Change, ...]
    gradients: tuple[GradientBirth, ...]


Steps = tuple[Span | Hook, ...]


class LayoutPart(NamedTuple):
    """One phase of a root segment, or of a stack. `steps`: spans and hooks by recorded layer (`steps[0]` for a root segment). `last`: the
    same for the last of the real layers that a recorded layer stands for, if its steps differ. `segments`: the index of each recorded
    layer's segment on the tape.
    """

    phase: TapePhase
    stack: int
    steps: dict[int, Steps]
    last: dict[int, Steps]
    segments: dict[int, int]


@dataclass(frozen=True, eq=False)
class TapeLayout:
    """A tape in the form that the builder walks. `recorded_layers`: by stack, the recorded layer of each real one, in forward
    order. `forward` has all parts before backward, also those of forwards without gradients. `embedding_gradients`: by (segment, event)
    that allocates them.
    """

    tape: Tape
    recorded_layers: tuple[tuple[int, ...], ...]
    forward: tuple[LayoutPart, ...]
    backward: tuple[LayoutPart, ...]
    spans: tuple[Span, ...]
    embedding_gradients: Mapping[tuple[int, int], EmbeddingGradient]


def stays_near(born: Segment, dying: Segment) -> bool:
    """Whether a storage that is freed in segment `dying` was allocated in the same or an adjacent layer (`born`). Every real layer then
    frees a storage of its own.
    """
    return born.stack == dying.stack != ROOT and abs(born.layer - dying.layer) <= 1


@lru_cache(maxsize=16)  # plans of one model share tapes
def tape_layout(
    profile: Profile,
    tape: Tape,
    *,
    gradient_hooks: bool,
    marked_units: frozenset[int] = frozenset(),
    compiled_embedding: bool = False,
) -> TapeLayout:
    """The tape divided at its marks. `gradient_hooks`: whether the marks of ready gradients are kept. `marked_units`: the units
    within the root's code (`MarkedUnit`) whose marks are kept, in addition to those of layers and root. `compiled_embedding`: compiled code
    adds up the gradients of embeddings, so these are not listed.
    """
    units = marked_units | {MarkedUnit.LAYER, MarkedUnit.ROOT}
    whole = tape.read()
    embeddings = {} if compiled_embedding else embedding_gradients(profile, whole)
    return _LayoutReader(profile, whole, gradient_hooks, units).layout(embeddings)


class _LayoutReader:
    """Reads a tape once, from end to end."""

    def __init__(self, profile: Profile, tape: Tape, gradient_hooks: bool, units: frozenset[int]) -> None:
        self._profile, self._tape, self._gradient_hooks, self._units = profile, tape, gradient_hooks, units
        self._spans: list[Span] = []

    def layout(self, embeddings: Mapping[tuple[int, int], EmbeddingGradient]) -> TapeLayout:
        forward: list[LayoutPart] = []
        backward: list[LayoutPart] = []
        for index, segment in enumerate(self._tape.segments):
            of_phase = backward if segment.phase == "backward" else forward
            if segment.stack == ROOT or not of_phase or of_phase[-1].stack != segment.stack:
                of_phase.append(LayoutPart(segment.phase, segment.stack, {}, {}, {}))
            layer = segment.layer if segment.stack != ROOT else 0
            of_phase[-1].segments[layer] = index
            differs = self._last_differs(segment)
            of_phase[-1].steps[layer] = tuple(self._steps(index, is_last=not differs))
            if differs:
                of_phase[-1].last[layer] = tuple(self._steps(index, is_last=True))
        recorded = tuple(stack.recorded_order for stack in self._profile.stacks)
        return TapeLayout(self._tape, recorded, tuple(forward), tuple(backward), tuple(self._spans), embeddings)

    def _last_differs(self, segment: Segment) -> bool:
        """Whether the segment stands for several layers and the last of them frees storages that all of them share."""
        if segment.stack == ROOT or self._profile.stacks[segment.stack].counts[segment.layer] == 1:
            return False
        born_in = {a for op, a, _ in segment.events if op == Op.FREE}
        return not all(stays_near(self._tape.segments[a], segment) for a in born_in)

    def _steps(self, index: int, is_last: bool) -> Iterator[Span | Hook]:
        """The spans and hooks of a segment in one real layer. `is_last`: it is the last layer of its kind.

        Only the last real layer frees storages from layers beyond its neighbours. If such a storage was allocated in a layer, the
        storages of all layers are freed there (autocast's cache of weights lives to the end of forward).
        """
        segments, births = self._tape.segments, self._tape.births
        allocated, found = 0, list[Allocated | Freed]()
        for at, (op, a, b) in enumerate(segments[index].events):
            if op == _ALLOC:
                found.append(Allocated(allocated, a, b, at))
                allocated += 1
            elif op == _FREE:
                if (is_near := stays_near(segments[a], segments[index])) or is_last:
                    found.append(Freed(a, b, *births[a][b], is_near))
            elif self._is_hook(op, a):
                yield from self._span(index, found)
                yield Hook(Op(op), a, b)
                found = []
        yield from self._span(index, found)

    def _is_hook(self, op: int, unit: int) -> bool:
        return self._gradient_hooks if op == Op.GRAD_READY else unit in self._units

    def _span(self, index: int, events: Sequence[Allocated | Freed]) -> Iterator[Span]:
        """The span of these events, or nothing if there are none."""
        if not events:
            return
        changes: list[Change] = []
        gradients: list[GradientBirth] = []
        for event in events:
            account = _account(event.category)
            if isinstance(event, Freed):
                changes.append(Change(account, event.size, -self._real_storages(event)))
                continue
            changes.append(Change(account, event.size, 1))
            if event.category not in _ACCOUNT_OF_CATEGORY:
                parameter, at_root = divmod(event.category - _GRADIENT, 2)
                gradients.append(GradientBirth(event.birth, parameter, bool(at_root), self._gradient(event.size)))
        self._spans.append(Span(len(self._spans), index, tuple(events), tuple(changes), tuple(gradients)))
        yield self._spans[-1]

    def _real_storages(self, freed: Freed) -> int:
        """The number of real storages that a recorded free stands for. It is 1; or, if the storage was allocated in a layer that is not
        adjacent, the number of real layers that the recorded layer stands for.
        """
        born = self._tape.segments[freed.segment]
        return 1 if freed.is_near or born.stack == ROOT else self._profile.stacks[born.stack].counts[born.layer]

    def _gradient(self, size: int) -> Storages:
        """The storage of a gradient. Raises NotRecordable for a sparse gradient, whose size depends on the batch."""
        found = self._tape.sizes[size]
        if isinstance(found, (Chunked, Divided, Staging, Tiled)) or any(found[1:]):
            raise NotRecordable("a gradient's size depends on the batch", hint="gradients must be dense: sparse=False")
        return Storages.of(round_up(found[0]))


def _account(category: int) -> int:
    return _ACCOUNT_OF_CATEGORY.get(category, _GRADIENT_ACCOUNT)


def storage_bytes(tape: Tape, b: int, t: int, resident_threads: int = 0) -> list[int]:
    """Bytes of each of the tape's sizes at micro-batch `b` and `t` tokens, rounded up to 512.

    `resident_threads`: the number of threads that the GPU runs at once; it determines the workspace of column reductions.
    """

    def bytes_of(size: Size) -> int:
        if isinstance(size, Staging):
            return reduction_workspace_bytes(value_at(size.rows, b, t), value_at(size.columns, b, t), resident_threads)
        return size.bytes_at(b, t) if isinstance(size, (Divided, Tiled)) else value_at(size, b, t)

    return [round_up(bytes_of(size)) for size in tape.sizes]


class SpanBytes(NamedTuple):
    """Lists by span number, at one (B, T): net bytes, and peak bytes relative to the span's beginning."""

    net: list[int]
    high: list[int]


def span_bytes(layout: TapeLayout, sizes: Sequence[int], excluded: frozenset[int] = frozenset()) -> SpanBytes:
    """Net bytes and peak of every span, without the accounts `excluded`."""
    net, high = [], []
    for span in layout.spans:
        level = highest = 0
        for account, size, times in span.changes:
            if account not in excluded:
                level += sizes[size] * times
                if level > highest:
                    highest = level
        net.append(level)
        high.append(highest)
    return SpanBytes(net, high)


def changes_by_account(span: Span, sizes: Sequence[int], excluded: frozenset[int] = frozenset()) -> dict[int, int]:
    """Net bytes of a span by account."""
    result: defaultdict[int, int] = defaultdict(int)
    for account, size, times in span.changes:
        if account not in excluded:
            result[account] += sizes[size] * times
    return result
