"""The two streams of a rank, compute and link, walked through one micro-batch; layers that repeat are folded.

Within a run of like layers both streams settle into a rhythm after two or three of them; from there on every layer moves each
stream by the same amount, and the rest of the run is one jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import sub

from fsdp_advisor.model.profile import ROOT, Profile, Run
from fsdp_advisor.timing.engines import Engine, UnitCosts
from fsdp_advisor.timing.pace import Pace, Place

_SAME_S = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """What one stream does from `begin_seconds` to `end_seconds`, counted from the beginning of the micro-batch."""

    stream: str  # "compute" or "communication"
    name: str
    begin_seconds: float
    end_seconds: float


@dataclass(slots=True)
class Streams:
    """Where the two streams stand, seconds from the beginning; `intervals` are kept where it is a list."""

    compute: float = 0.0
    link: float = 0.0
    begun: float = 0.0  # when the last unit's compute began
    computed: float = 0.0  # all compute so far
    sent: float = 0.0  # all communication so far
    pending: float = 0.0  # the reduction that the last unit's backward asked for
    pending_name: str = ""
    intervals: list[Interval] | None = None

    def state(self) -> tuple[float, float, float, float, float]:
        return self.compute, self.link, self.begun, self.computed, self.sent

    def send(self, seconds: float, not_before: float, what: str, whose: str) -> float:
        """Put a transfer on the link; returns when it is done."""
        begin = self.link if self.link > not_before else not_before
        self.link = begin + seconds
        self.sent += seconds
        if self.intervals is not None and seconds:
            self.intervals.append(Interval("communication", f"{what} {whose}", begin, self.link))
        return self.link

    def work(self, seconds: float, ready: float, what: str, whose: str) -> None:
        """Run compute once `ready`."""
        self.begun = self.compute if self.compute > ready else ready
        self.compute = self.begun + seconds
        self.computed += seconds
        if self.intervals is not None and seconds:
            self.intervals.append(Interval("compute", f"{what} {whose}", self.begun, self.compute))

    def flush(self) -> None:
        """Send the reduction that waits."""
        if self.pending:
            self.send(self.pending, self.compute, "reduce", self.pending_name)
            self.pending = 0.0


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch to be walked. `reduces`: gradients are reduced at its end; costs by place, seconds."""

    profile: Profile
    pace: Pace
    engine: Engine
    costs: dict[Place, UnitCosts]
    reduces: bool
    streams: Streams = field(default_factory=Streams)

    def walk(self) -> Streams:
        """Forward and backward, both streams joined at the end."""
        s, root = self.streams, self.costs[ROOT, 0]
        name = self.profile.root.kind
        ready = s.send(root.gather, 0.0, "all-gather", name) if self.engine.gathers_forward else 0.0
        for stack, seconds, runs in self.pace.forward:
            if stack == ROOT:
                s.work(seconds[0], ready, "forward", name)
                continue
            s.begun = max(s.begun, ready)
            for run in runs:
                self._fold(run, stack, seconds, self._forward)
        first = True
        for index, (stack, seconds, runs) in enumerate(self.pace.backward):
            if stack == ROOT:
                gathers = first and self.engine.gathers_backward
                ready = s.send(root.gather, s.compute, "all-gather", name) if gathers else 0.0
                s.work(seconds[0], ready, "backward", name)
                first = False
                if index == 0 and self.reduces and not self.engine.gathers_forward:
                    s.send(
                        root.reduce * self._tail(), s.compute, "all-reduce", name
                    )  # DDP: the head's buckets go first
                continue
            for run in runs:
                self._fold(run, stack, seconds, self._backward)
        s.flush()
        if self.reduces and self.engine.overlaps:
            share = 1.0 if self.engine.gathers_forward else 1 - self._tail()
            what = "reduce-scatter" if self.engine.gathers_forward else "all-reduce"
            s.send(root.reduce * share, s.compute, what, name)
        s.compute = max(s.compute, s.link if s.sent else 0.0)
        return s

    def _tail(self) -> float:
        """The share of the root's parameters that stand after the last stack: their gradients come first."""
        order, root = self.profile.order, self.profile.root
        after = order[-1] if order else 0
        return sum(p.elements for p in root.parameters[after:]) / root.elements if root.elements else 0.0

    def _forward(self, costs: UnitCosts, seconds: float, name: str) -> None:
        s = self.streams
        ready = s.send(costs.gather, s.begun, "all-gather", name) if self.engine.gathers_forward else 0.0
        s.work(seconds, ready, "forward", name)

    def _backward(self, costs: UnitCosts, seconds: float, name: str) -> None:
        s, prefetch, ready = self.streams, self.engine.prefetch, 0.0
        if not self.engine.gathers_backward:
            s.flush()
        elif prefetch == "none":
            s.flush()
            ready = s.send(costs.gather, s.compute, "all-gather", name)
        else:
            ready = s.send(costs.gather, s.begun if prefetch == "pre" else s.compute, "all-gather", name)
            s.flush()
        s.work(seconds, ready, "backward", name)
        if self.reduces and self.engine.overlaps:
            s.pending, s.pending_name = costs.reduce, name

    def _name(self, stack: int, layer: int) -> str:
        """Only intervals tell it."""
        if self.streams.intervals is None:
            return ""
        return f"{self.profile.stacks[stack].path}.{self.profile.stacks[stack].units[layer].kind}"

    def _fold(self, run: Run, stack: int, seconds: Mapping[int, float], step: Callable[..., None]) -> None:
        s = self.streams
        turns = [(self.costs[stack, layer], seconds[layer], self._name(stack, layer)) for layer in run.pattern]
        left, last = run.repeats, None
        if left == 1:
            for turn in turns:
                step(*turn)
            return
        before = s.state()
        while left:
            for turn in turns:
                step(*turn)
            left -= 1
            now = s.state()
            moved = tuple(map(sub, now, before))
            before = now
            if left > 1 and s.intervals is None and last is not None and _same(moved, last):
                jump = self._jump(left, moved)
                s.compute, s.link, s.begun, s.computed, s.sent = (
                    value + jump * by for value, by in zip(now, moved, strict=True)
                )
                left -= jump
                before, last = s.state(), None
                continue
            last = moved

    def _jump(self, left: int, moved: tuple[float, ...]) -> int:
        """How many repetitions go by alike: all, unless a link that is behind catches up on the way."""
        ahead, gains = self.streams.link - self.streams.compute, moved[0] - moved[1]
        if gains <= _SAME_S or ahead <= 0:
            return left
        return min(left, max(0, int(ahead / gains) - 1))


def _same(one: Iterable[float], other: Iterable[float]) -> bool:
    return all(abs(a - b) <= _SAME_S + 1e-9 * abs(a) for a, b in zip(one, other, strict=True))
