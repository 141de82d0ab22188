"""Replaying a step: the tape's blocks and the schedule's events, in order, over all layers.

Layers that repeat are not walked one by one. Once a pattern of layers has been walked twice, each further repetition moves
the ledger by the same amount, so its highest point lies in the first or in the last of them: the ones between are one shift.
A schedule whose own state spans many layers (`WalksEveryLayer`) is shown each of them instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from fsdp_advisor.memory.held import States
from fsdp_advisor.memory.ledger import AT_ROOT, Ledger, Place
from fsdp_advisor.memory.score import Part, Score, Step
from fsdp_advisor.models.profile import ROOT, Op, Profile, Run

WALKED_AT_EACH_END = 2


class Schedule(Protocol):
    """What a training engine does around the units of a step. Every method tells the ledger what is born and dies.

    `made_by_first_step` are the accounts of what is alive when a step begins but was not yet when the first one did;
    `distinct_micro_batches` how many micro-batches of a step differ: the first, the others, and the last where that is another.
    """

    grad_marks: bool
    distinct_micro_batches: int
    made_by_first_step: frozenset[int]
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


class WalksEveryLayer(Protocol):
    """A schedule for which, in the phases that `walk_all` names, no two repetitions of a layer need be alike.

    `play_layer` plays a whole segment at once where the schedule can; where it returns False, it has done nothing, and the
    segment is played step by step.
    """

    walk_all: frozenset[str]

    def play_layer(self, ledger: Ledger, place: Place, steps: tuple[Step, ...]) -> bool: ...


def replay(
    profile: Profile, score: Score, schedule: Schedule, accumulation: int, ledger: Ledger | None = None
) -> Ledger:
    """One steady-state step of `accumulation` micro-batches, told to `ledger`. Those that are alike are told once."""
    ledger = ledger or Ledger()
    schedule.begin_step(ledger)
    ledger.begin_step()
    for index in range(min(accumulation, schedule.distinct_micro_batches)):
        ledger.begin_micro_batch(index)
        schedule.begin_micro_batch(ledger, index)
        ledger.begin("forward")
        _walk(profile, score.forward, schedule, ledger, backward=False)
        ledger.drop_last_loss()
        ledger.begin("backward")
        _walk(profile, score.backward, schedule, ledger, backward=True)
        ledger.enter(AT_ROOT, "end of backward")
        schedule.end_backward(ledger)
        ledger.point("end of backward")
    ledger.begin("optimizer")
    ledger.enter(AT_ROOT, "optimizer step")
    schedule.optimizer_step(ledger)
    ledger.point("optimizer step")
    return ledger


def _walk(profile: Profile, parts: tuple[Part, ...], schedule: Schedule, ledger: Ledger, *, backward: bool) -> None:
    entries = list(_entries(profile, parts, backward, every_layer=ledger.follows_storages))
    following: list[Place | None] = [None] * len(entries)
    upcoming: Place | None = None
    for i in range(len(entries) - 1, -1, -1):
        following[i] = upcoming
        if entries[i][0] != ROOT and not entries[i][3]:
            upcoming = (entries[i][0], entries[i][1])
    before: list[list[int]] = []
    walker = _walks_every_layer(schedule, ledger.phase)
    for i, ((stack, layer, steps, skipped, period), after) in enumerate(zip(entries, following, strict=True)):
        if skipped and walker is not None:
            pattern = [((s, n), _name(profile, (s, n)), own) for s, n, own, _, _ in entries[i - period : i]]
            for place, name, own in pattern * skipped:
                ledger.enter(place, name)
                if not walker.play_layer(ledger, place, own):
                    _play(own, schedule, ledger, place, None)
                ledger.point(name)
            continue
        if skipped:
            net = [now - then for now, then in zip(ledger.live, before[-1 - period], strict=True)]
            ledger.shift(net, skipped)
            ledger.point("", skipped * period)
            continue
        place = (stack, layer)
        ledger.enter(place, _name(profile, place))
        _play(steps, schedule, ledger, place, after)
        ledger.point(ledger.where)
        before.append(list(ledger.live))


def _walks_every_layer(schedule: Schedule, phase: str) -> WalksEveryLayer | None:
    """The schedule, if it does; asked by attribute, since to ask a protocol costs as much as a layer."""
    if phase not in getattr(schedule, "walk_all", ()):
        return None
    return cast(WalksEveryLayer, schedule)


def _entries(
    profile: Profile, parts: tuple[Part, ...], backward: bool, every_layer: bool
) -> Iterator[tuple[int, int, tuple[Step, ...], int, int]]:
    """(stack, recorded layer, steps, 0, 0) to be walked, or (.., skipped repeats, period) to be jumped."""
    for part in parts:
        if part.stack == ROOT:
            yield (ROOT, 0, part.steps[0], 0, 0)
            continue
        runs = profile.stacks[part.stack].runs
        for run in reversed(runs) if backward else runs:
            pattern = run.pattern[::-1] if backward else run.pattern
            yield from _run_entries(part, Run(pattern, run.repeats), every_layer)


def _run_entries(part: Part, run: Run, every_layer: bool) -> Iterator[tuple[int, int, tuple[Step, ...], int, int]]:
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
