"""Steps of models whose code repeats an iteration for each token or chunk of a sequence, made for long sequences from short ones.

Sequences that differ by one iteration have the same events, except that each loop has one more copy of its block. From four such
sequences follows which events repeat, and how sizes and the order of births of freed storages depend on the number of iterations. The
step of a long sequence has as many more copies. Two longer recordings, which the rule was not made from, confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from math import comb
from typing import NamedTuple

from fsdp_advisor.model.tape import Op
from fsdp_advisor.recording.operators import NONE, Work
from fsdp_advisor.recording.raw_steps import RawSegment, RawStep, RawStorage, frees_in_order, operators, quantities

EDGE = 1
"""Iterations at each end of a loop that may free other storages than those between them."""
MOST_EVENTS = 400
"""The most events of an iteration that are looked for."""


class NotRepeated(Exception):
    """The events are not those of loops that differ by one iteration."""


@dataclass(frozen=True)
class _Loop:
    """A loop in the events of the shortest sequence: where its last block ends, its events and its number of copies."""

    end: int
    period: int
    copies: int


_Place = tuple[int, int, int]
"""Where an event is in its segment: (its loop, or -1; the first iteration, the last, or one between; its number in block or segment)."""


class _Birth(NamedTuple):
    """The storage that a place allocates, and its sizes and columns in steps with 0, 1, 2, ... iterations more."""

    storage: RawStorage
    sizes: list[int]
    columns: list[int]


class _Free(NamedTuple):
    """Which storage a place frees. `home`: the segment that allocates it. `start`: how many storages this segment allocates before it, in
    the first iteration of the first step. `per_copy`, `per_length`: how many more in each following iteration, and in each following step.
    """

    home: int
    start: int
    per_copy: int
    per_length: int


def with_iterations(steps: Sequence[RawStep], more: int) -> RawStep:
    """The step with `more` iterations than the first of `steps`, which have 0, 1, 2, ... iterations more than it.

    Raises NotRepeated if the steps do not follow one rule.
    """
    if len({tuple((s.phase, s.stack, s.layer) for s in step.segments) for step in steps}) > 1:
        raise NotRepeated
    births = [_births(step) for step in steps]
    tokens = _tokens(steps, births)
    loops = [_loops_of(found) for found in zip(*tokens, strict=True)]
    if not any(loops):
        raise NotRepeated
    segments: list[RawSegment] = []
    storages: list[RawStorage] = []
    numbers: dict[tuple[int, int], int] = {}
    for number, of_loops in enumerate(loops):
        allocated, freed = _rules(steps, births, number, of_loops)
        events: list[tuple[int, int, int]] = []
        born = 0
        for i, place, copy in _order(of_loops, len(tokens[0][number]), more):
            op, a, b = steps[0].segments[number].events[i]
            if op == Op.ALLOC:
                storage, sizes, columns = allocated[place]
                numbers[number, born] = len(storages)
                events.append((op, len(storages), 0))
                columns_now = None if storage.columns is None else _newton(columns, more)
                storages.append(replace(storage, size=_newton(sizes, more), columns=columns_now))
                born += 1
            elif op == Op.FREE:
                home, start, per_copy, per_length = freed[place]
                freed_number = numbers.get((home, start + per_copy * copy + per_length * more))
                if freed_number is None:
                    raise NotRepeated
                events.append((op, freed_number, 0))
            else:
                events.append((op, a, b))
        segments.append(_segment(steps, number, frees_in_order(events), more))
    return RawStep(segments, storages)


def _tokens(steps: Sequence[RawStep], births: Sequence[dict[int, tuple[int, int]]]) -> list[list[list[object]]]:
    """The events of each segment of each step, without sizes. A free names the segment that allocated the storage, and where: its event in
    a loop, whatever the iteration, or its number before or after loops.
    """
    allocations = [[_allocations(step, segment) for segment in step.segments] for step in steps]
    places: list[dict[tuple[int, int], object]] = [{} for _ in steps]
    for number, found in enumerate(zip(*allocations, strict=True)):
        loops = _loops_of(found)
        for extra, of in enumerate(places):
            for born, (i, (loop, _, event), _) in enumerate(_order(loops, len(found[0]), extra)):
                of[number, born] = (number, loop, event if loop >= 0 else i)
    return [
        [[_token(step, event, of_births, born) for event in segment.events] for segment in step.segments]
        for step, of_births, born in zip(steps, births, places, strict=True)
    ]


def _token(
    step: RawStep,
    event: tuple[int, int, int],
    births: dict[int, tuple[int, int]],
    places: dict[tuple[int, int], object],
) -> object:
    """An event without sizes and numbers of storages."""
    op, a, _ = event
    if op == Op.FREE:
        return op, places[births[a]]
    return (op, *_kind(step.storages[a])) if op == Op.ALLOC else event


def _allocations(step: RawStep, segment: RawSegment) -> list[object]:
    """The storages that a segment allocates, without sizes."""
    return [_kind(step.storages[a]) for op, a, _ in segment.events if op == Op.ALLOC]


def _kind(storage: RawStorage) -> tuple[object, ...]:
    return storage.category, storage.phase, storage.columns is None, storage.tiled, storage.parts


def _births(step: RawStep) -> dict[int, tuple[int, int]]:
    """By number of a storage, the segment that allocates it and how many it has allocated before."""
    found: dict[int, tuple[int, int]] = {}
    for number, segment in enumerate(step.segments):
        allocated = [a for op, a, _ in segment.events if op == Op.ALLOC]
        found |= {a: (number, born) for born, a in enumerate(allocated)}
    return found


def _loops_of(found: Sequence[list[object]]) -> list[_Loop]:
    """The loops of a segment, from its events in all steps. Raises NotRepeated if they have no common rule."""
    loops = _loops(*found[:2])
    for extra, events in enumerate(found):
        if [found[0][i] for i, *_ in _order(loops, len(found[0]), extra)] != events:
            raise NotRepeated
    return loops


def _loops(short: list[object], long: list[object]) -> list[_Loop]:
    """The loops of a segment, whose blocks `long` has once more than `short`. Raises NotRepeated if the rest differs."""
    found: list[_Loop] = []
    at = shift = 0
    while at < len(short) or at + shift < len(long):
        if at < len(short) and at + shift < len(long) and short[at] == long[at + shift]:
            at += 1
            continue
        period = _period(short[at:], long, at + shift)
        begin = found[-1].end if found else 0
        copies = 1
        block = short[at - period : at]
        while at - (copies + 1) * period >= begin and short[at - (copies + 1) * period : at - copies * period] == block:
            copies += 1
        if copies < 2 * EDGE + 2:
            raise NotRepeated
        found.append(_Loop(at, period, copies))
        shift += period
    return found


def _period(rest: list[object], long: list[object], here: int) -> int:
    """The length of the block that `long` repeats at `here`: after it, `long` continues as `rest` does for as long as possible."""
    best = (0, 0)
    for period in range(1, min(here, MOST_EVENTS) + 1):
        after = here + period
        if long[here:after] == long[here - period : here]:
            equal = takewhile(
                lambda pair: pair[0] == pair[1], zip(rest, long[after : after + MOST_EVENTS], strict=False)
            )
            best = max(best, (sum(1 for _ in equal) + (after + len(rest) == len(long)), -period))
    if not best[0]:
        raise NotRepeated
    return -best[1]


def _order(loops: list[_Loop], count: int, more: int) -> Iterator[tuple[int, _Place, int]]:
    """The events of a segment of which each loop has `more` copies: the index among `count` events of the shortest sequence, its place, and
    the iteration.
    """
    at = 0
    for number, loop in enumerate(loops):
        begin = loop.end - loop.copies * loop.period
        for i in range(at, begin):
            yield i, (-1, 0, i), 0
        copies = loop.copies + more
        for copy in range(copies):
            kind = copy if copy < EDGE else copy - copies if copy >= copies - EDGE else EDGE
            of = min(copy, EDGE) if kind >= 0 else loop.copies + kind
            for event in range(loop.period):
                yield begin + of * loop.period + event, (number, kind, event), copy if kind == EDGE else 0
        at = loop.end
    for i in range(at, count):
        yield i, (-1, 0, i), 0


def _rules(
    steps: Sequence[RawStep], births: Sequence[dict[int, tuple[int, int]]], number: int, loops: list[_Loop]
) -> tuple[dict[_Place, _Birth], dict[_Place, _Free]]:
    """What each place of a segment allocates or frees. Raises NotRepeated if the steps do not follow such rules."""
    count = len(steps[0].segments[number].events)
    storages: dict[_Place, list[list[RawStorage]]] = {}
    frees: dict[_Place, dict[tuple[int, int], tuple[int, int]]] = {}
    for extra, step in enumerate(steps):
        events = step.segments[number].events
        for (_, place, copy), (op, a, _) in zip(_order(loops, count, extra), events, strict=True):
            if op == Op.ALLOC:
                storages.setdefault(place, [[] for _ in steps])[extra].append(step.storages[a])
            elif op == Op.FREE:
                frees.setdefault(place, {})[extra, copy] = births[extra][a]
    return {p: _birth(of) for p, of in storages.items()}, {p: _free(of) for p, of in frees.items()}


def _birth(storages: list[list[RawStorage]]) -> _Birth:
    """The rule of a place that allocates: the storages of all its iterations in each step are of one size, at most of degree 2."""
    found = _Birth(storages[0][0], [of[0].size for of in storages], [of[0].columns or 0 for of in storages])
    one_size = all((s.size, s.columns) == (of[0].size, of[0].columns) for of in storages for s in of)
    if not one_size or _differences(found.sizes)[-1] or _differences(found.columns)[-1]:
        raise NotRepeated
    return found


def _free(births: dict[tuple[int, int], tuple[int, int]]) -> _Free:
    """The rule of a place that frees. `births`: by step and iteration, the segment of the storage, and its number there."""
    first = min(copy for _, copy in births)
    home, start = births[0, first]
    per_copy = births.get((0, first + 1), (home, start))[1] - start
    found = _Free(home, start - per_copy * first, per_copy, births[1, first][1] - start)
    for (extra, copy), (segment, born) in births.items():
        if (segment, born) != (home, found.start + per_copy * copy + found.per_length * extra):
            raise NotRepeated
    return found


def _segment(steps: Sequence[RawStep], number: int, events: list[tuple[int, int, int]], more: int) -> RawSegment:
    """A segment with these events, and with the work and the copies to and from the host of `more` iterations."""
    all_of = [step.segments[number] for step in steps]
    copies = [segment.host_copies for segment in all_of]
    if len({len(of) for of in copies}) > 1 or len({s.recomputed is None for s in all_of}) > 1:
        raise NotRepeated
    again = None if all_of[0].recomputed is None else [_work([s.recomputed or [] for s in all_of], more)]
    return RawSegment(
        all_of[0].phase,
        all_of[0].stack,
        all_of[0].layer,
        events,
        [_work([s.work for s in all_of], more)],
        again,
        [_newton(sizes, more) for sizes in zip(*copies, strict=True)],
    )


def _work(works: Sequence[list[Work]], more: int) -> Work:
    """The total work with `more` iterations."""
    totals = [(*quantities(sum(of, NONE)), operators(of)) for of in works]
    return Work(*(_newton(values, more) for values in zip(*totals, strict=True)))


def _differences(values: Sequence[int]) -> list[int]:
    """Newton's forward differences: the first value, the first difference, the second, and so on."""
    found = []
    while values:
        found.append(values[0])
        values = [b - a for a, b in pairwise(values)]
    return found


def _newton(values: Sequence[int], more: int) -> int:
    """The value after `more` steps of the polynomial through `values`.

    >>> _newton([1, 4, 9, 16], 9)
    100
    """
    return sum(comb(more, order) * difference for order, difference in enumerate(_differences(values)))
