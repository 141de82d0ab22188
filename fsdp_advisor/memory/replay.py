"""Replaying a step: the tape's blocks and the schedule's events, in order, over all layers.

Layers that repeat are not walked one by one. Once a pattern of layers has been walked twice, each further repetition moves
the ledger by the same amount, so its highest point lies in the first or in the last of them: the ones between are one shift.
A schedule whose own state spans many layers (`WalksEveryLayer`) is shown each of them instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from fsdp_advisor.memory.held import States
from fsdp_advisor.memory.ledger import ACTIVATIONS, LOSS, OTHER, TEMPORARIES, Ledger
from fsdp_advisor.memory.score import Part, Score, Step
from fsdp_advisor.models.profile import ROOT, Op, Profile, Run

WALKED_AT_EACH_END = 2

Place = tuple[int, int]
"""(stack, recorded layer), or (ROOT, 0)."""
AT_ROOT: Place = (ROOT, 0)


class Schedule(Protocol):
    """What a training engine does around the units of a step. Every method changes the ledger."""

    grad_marks: bool
    distinct_micro_batches: int
    """How many micro-batches of a step differ: the first, those between, and the last where that is another."""
    states: States

    def begin_step(self, ledger: Ledger) -> None: ...
    def begin_micro_batch(self, ledger: Ledger, index: int) -> None: ...
    def pre_forward(self, ledger: Ledger, place: Place) -> None: ...
    def post_forward(self, ledger: Ledger, place: Place) -> None: ...
    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None: ...
    def post_backward(self, ledger: Ledger, place: Place, gradient_bytes: int) -> None: ...
    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int, gradient_bytes: int) -> None: ...
    def end_backward(self, ledger: Ledger, root_gradient_bytes: int) -> None: ...
    def optimizer_step(self, ledger: Ledger) -> None: ...


@runtime_checkable
class WalksEveryLayer(Protocol):
    """A schedule for which, in the phases that `walk_all` names, no two repetitions of a layer need be alike.

    `play_layer` plays a whole segment at once where the schedule can; where it returns False, it has done nothing, and the
    segment is played step by step.
    """

    walk_all: frozenset[str]

    def play_layer(self, ledger: Ledger, place: Place, steps: tuple[Step, ...]) -> bool: ...


def replay(profile: Profile, score: Score, schedule: Schedule, accumulation: int) -> Ledger:
    """One steady-state step of `accumulation` micro-batches. Those that are alike are played once."""
    ledger = Ledger()
    schedule.begin_step(ledger)
    ledger.begin("forward")
    base = list(ledger.live)
    walker = schedule if isinstance(schedule, WalksEveryLayer) else None
    for index in range(min(accumulation, schedule.distinct_micro_batches)):
        leftover = [0] * len(base)
        if index:  # the tape brings its batch again; the last loss is dropped once there is another
            for account in (ACTIVATIONS, LOSS, TEMPORARIES):
                leftover[account] = base[account] - ledger.live[account]
            ledger.add(OTHER, base[OTHER] - ledger.live[OTHER])
        schedule.begin_micro_batch(ledger, index)
        ledger.begin("forward")
        _walk(profile, score.forward, schedule, walker, ledger, backward=False)
        ledger.shift(leftover)
        ledger.begin("backward")
        gradients = _walk(profile, score.backward, schedule, walker, ledger, backward=True)
        ledger.where = "end of backward"
        schedule.end_backward(ledger, gradients)
        ledger.point("end of backward")
    ledger.begin("optimizer")
    ledger.where = "optimizer step"
    schedule.optimizer_step(ledger)
    ledger.point("optimizer step")
    return ledger


def _walk(
    profile: Profile,
    parts: tuple[Part, ...],
    schedule: Schedule,
    walker: WalksEveryLayer | None,
    ledger: Ledger,
    *,
    backward: bool,
) -> int:
    """Walk all parts; returns the root's gradient bytes that are alive."""
    entries = list(_entries(profile, parts, backward))
    following: list[Place | None] = [None] * len(entries)
    upcoming: Place | None = None
    for i in range(len(entries) - 1, -1, -1):
        following[i] = upcoming
        if entries[i][0] != ROOT and not entries[i][3]:
            upcoming = (entries[i][0], entries[i][1])
    root_gradients = 0
    before: list[list[int]] = []
    last_gradients = 0
    if walker is not None and ledger.phase not in walker.walk_all:
        walker = None
    for i, ((stack, layer, steps, skipped, period), after) in enumerate(zip(entries, following, strict=True)):
        if skipped and walker is not None:
            pattern = [((s, n), _name(profile, (s, n)), own) for s, n, own, _, _ in entries[i - period : i]]
            for place, name, own in pattern * skipped:
                ledger.where = name
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
        ledger.where = _name(profile, place)
        last_gradients = _play(steps, schedule, ledger, place, after)
        root_gradients += last_gradients
        ledger.point(ledger.where)
        before.append(list(ledger.live))
    return root_gradients


def _entries(
    profile: Profile, parts: tuple[Part, ...], backward: bool
) -> Iterator[tuple[int, int, tuple[Step, ...], int, int]]:
    """(stack, recorded layer, steps, 0, 0) to be walked, or (.., skipped repeats, period) to be jumped."""
    for part in parts:
        if part.stack == ROOT:
            yield (ROOT, 0, part.steps[0], 0, 0)
            continue
        runs = profile.stacks[part.stack].runs
        for run in reversed(runs) if backward else runs:
            pattern = run.pattern[::-1] if backward else run.pattern
            yield from _run_entries(part, Run(pattern, run.repeats))


def _run_entries(part: Part, run: Run) -> Iterator[tuple[int, int, tuple[Step, ...], int, int]]:
    once = [(part.stack, layer, part.steps[layer], 0, 0) for layer in run.pattern]
    if run.repeats <= 2 * WALKED_AT_EACH_END + 1:
        for _ in range(run.repeats):
            yield from once
        return
    for _ in range(WALKED_AT_EACH_END):
        yield from once
    yield (part.stack, run.pattern[0], (), run.repeats - 2 * WALKED_AT_EACH_END, len(run.pattern))
    for _ in range(WALKED_AT_EACH_END):
        yield from once


def _play(steps: tuple[Step, ...], schedule: Schedule, ledger: Ledger, place: Place, following: Place | None) -> int:
    """One segment's steps. Returns the root's gradient bytes born in it."""
    own = root = fresh = 0
    for step in steps:
        if not isinstance(step, tuple):
            ledger.apply(step)
            own += step.layer_gradients
            root += step.root_gradients
            fresh += step.layer_gradients + step.root_gradients
            continue
        op, a, b = step
        at = (ROOT, a - 1) if a else place
        if op == Op.GRAD_READY:
            schedule.gradient_ready(ledger, AT_ROOT if b else place, a, fresh)
            if schedule.grad_marks:
                fresh = 0
        elif op == Op.PRE_FORWARD:
            schedule.pre_forward(ledger, at)
        elif op == Op.POST_FORWARD:
            schedule.post_forward(ledger, at)
        elif op == Op.PRE_BACKWARD:
            schedule.pre_backward(ledger, at, following)
        elif op == Op.POST_BACKWARD and not a:
            schedule.post_backward(ledger, place, own)
            own = 0
        elif op == Op.POST_BACKWARD:
            schedule.post_backward(ledger, at, root)
            root = 0
    return root


def _name(profile: Profile, place: Place) -> str:
    stack, layer = place
    if stack == ROOT:
        return profile.root.kind
    return f"{profile.stacks[stack].path}.{profile.stacks[stack].units[layer].kind}"
