"""Replaying a step: the tape's stretches and the schedule's events, in order, over all layers.

Layers that repeat are not walked one by one. Once a pattern of layers has been walked twice, each further repetition moves
the ledger by the same amount, so its highest point lies in the first or in the last of them: the ones between are one jump.
A schedule whose own state spans many layers (`walk_all`) is shown each of them instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fsdp_advisor.memory.ledger import AT_ROOT, Here, Ledger, Place
from fsdp_advisor.memory.score import Part, Shape, Step
from fsdp_advisor.memory.storages import States
from fsdp_advisor.model.profile import ROOT, Op, Profile, Run

WALKED_AT_EACH_END = 2


class Schedule(Protocol):
    """What a training engine does around the units of a step. Every method tells the ledger what is born and dies.

    `made_by_first_step` are the accounts of what is alive when a step begins but was not yet when the first one did;
    `distinct_micro_batches` how many micro-batches of a step differ: the first, the others, and the last where that is another;
    `walk_all` the phases in which no two repetitions of a layer need be alike.
    """

    grad_marks: bool
    distinct_micro_batches: int
    made_by_first_step: frozenset[int]
    walk_all: frozenset[str]
    states: States

    def begin_step(self, ledger: Ledger) -> None: ...
    def begin_micro_batch(self, ledger: Ledger, index: int) -> None: ...
    def pre_forward(self, ledger: Ledger, place: Place) -> None: ...
    def post_forward(self, ledger: Ledger, place: Place) -> None: ...
    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None: ...
    def post_backward(self, ledger: Ledger, place: Place) -> None: ...
    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None: ...
    def end_backward(self, ledger: Ledger) -> None: ...
    def optimizer_step(self, ledger: Ledger) -> None: ...


def replay(profile: Profile, shape: Shape, schedule: Schedule, accumulation: int, ledger: Ledger) -> None:
    """One steady-state step of `accumulation` micro-batches, told to `ledger`. Those that are alike are told once."""
    schedule.begin_step(ledger)
    ledger.begin_step()
    for index in range(min(accumulation, schedule.distinct_micro_batches)):
        ledger.begin_micro_batch(index)
        schedule.begin_micro_batch(ledger, index)
        ledger.begin("forward")
        _walk(profile, shape.forward, schedule, ledger, backward=False)
        ledger.drop_last_loss()
        ledger.begin("backward")
        _walk(profile, shape.backward, schedule, ledger, backward=True)
        ledger.enter(AT_ROOT, "end of backward")
        schedule.end_backward(ledger)
        ledger.point("end of backward")
    ledger.begin("optimizer")
    ledger.enter(AT_ROOT, "optimizer step")
    schedule.optimizer_step(ledger)
    ledger.point("optimizer step")


def _walk(profile: Profile, parts: tuple[Part, ...], schedule: Schedule, ledger: Ledger, *, backward: bool) -> None:
    entries = list(_entries(profile, parts, backward, every_layer=ledger.follows_storages))
    following: list[Place | None] = [None] * len(entries)
    upcoming: Place | None = None
    for i in range(len(entries) - 1, -1, -1):
        following[i] = upcoming
        if entries[i][0] != ROOT and not entries[i][3]:
            upcoming = (entries[i][0], entries[i][1])
    before: list[Here] = []
    for i, ((stack, layer, steps, skipped, period), after) in enumerate(zip(entries, following, strict=True)):
        if skipped and ledger.phase in schedule.walk_all:
            pattern = [((s, n), _name(profile, (s, n)), own) for s, n, own, _, _ in entries[i - period : i]]
            for _ in range(skipped):
                ledger.repetition()
                for place, name, own in pattern:
                    ledger.enter(place, name)
                    _play(own, schedule, ledger, place, None)
                    ledger.point(name)
            ledger.end_run()
            continue
        if skipped:
            ledger.jump(before[-1 - period], skipped)
            ledger.point("", skipped * period)
            continue
        place = (stack, layer)
        ledger.enter(place, _name(profile, place))
        _play(steps, schedule, ledger, place, after)
        ledger.point(ledger.where)
        before.append(ledger.here())


Entry = tuple[int, int, tuple[Step, ...], int, int]
"""(stack, recorded layer, steps, 0, 0) to be walked, or (.., skipped repeats, period) to be jumped."""


def _entries(profile: Profile, parts: tuple[Part, ...], backward: bool, every_layer: bool) -> Iterator[Entry]:
    for part in parts:
        if part.stack == ROOT:
            yield (ROOT, 0, part.steps[0], 0, 0)
            continue
        runs = profile.stacks[part.stack].runs
        entries: list[Entry] = []
        for run in reversed(runs) if backward else runs:
            pattern = run.pattern[::-1] if backward else run.pattern
            entries += _run_entries(part, Run(pattern, run.repeats), every_layer)
        for layer, steps in part.last.items():
            last = max(at for at, entry in enumerate(entries) if entry[1] == layer)  # no run ends with a jump
            entries[last] = (part.stack, layer, steps, 0, 0)
        yield from entries


def _run_entries(part: Part, run: Run, every_layer: bool) -> Iterator[Entry]:
    once = [(part.stack, layer, part.steps[layer], 0, 0) for layer in run.pattern]
    if every_layer or run.repeats <= 2 * WALKED_AT_EACH_END + 1:
        for _ in range(run.repeats):
            yield from once
        return
    for _ in range(WALKED_AT_EACH_END):
        yield from once
    yield (part.stack, run.pattern[0], (), run.repeats - 2 * WALKED_AT_EACH_END, len(run.pattern))
    for _ in range(WALKED_AT_EACH_END):
        yield from once


def _play(steps: tuple[Step, ...], schedule: Schedule, ledger: Ledger, place: Place, following: Place | None) -> None:
    """One segment's steps."""
    for step in steps:
        if not isinstance(step, tuple):
            ledger.apply(step)
            continue
        op, a, b = step
        at = (ROOT, a - 1) if a else place
        if op == Op.GRAD_READY:
            schedule.gradient_ready(ledger, AT_ROOT if b else place, a)
        elif op == Op.PRE_FORWARD:
            schedule.pre_forward(ledger, at)
        elif op == Op.POST_FORWARD:
            schedule.post_forward(ledger, at)
        elif op == Op.PRE_BACKWARD:
            schedule.pre_backward(ledger, at, following)
        elif op == Op.POST_BACKWARD:
            schedule.post_backward(ledger, at)


def _name(profile: Profile, place: Place) -> str:
    stack, layer = place
    if stack == ROOT:
        return profile.root.kind
    return f"{profile.stacks[stack].path}.{profile.stacks[stack].units[layer].kind}"
