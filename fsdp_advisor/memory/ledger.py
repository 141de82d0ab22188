"""What is alive on rank 0, by account, as a step goes on."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fsdp_advisor.memory.storages import Storages
from fsdp_advisor.model.profile import ROOT

ACCOUNTS = {
    "parameters": "weights kept from step to step",
    "gradients": "gradients kept until the optimizer step",
    "optimizer": "optimizer state, master weights included",
    "unsharded_parameters": "gathered layers; autocast's casts",
    "unsharded_gradients": "whole gradients, not yet reduced",
    "communication": "buckets and buffers of collectives",
    "activations": "saved in forward for backward",
    "loss": "logits and what the loss makes of them",
    "temporaries": "born and dead within one phase",
    "other": "the batch, buffers",
}
"""What may be alive, and what that is."""
GROUPS = {
    "states": ("parameters", "gradients", "optimizer"),
    "gathered": ("unsharded_parameters", "unsharded_gradients", "communication"),
    "activations": ("activations",),
    "loss": ("loss",),
    "other": ("temporaries", "other"),
}
"""The accounts as people think of them, and as every bar is made of them: together all."""
(PARAMETERS, GRADIENTS, OPTIMIZER, UNSHARDED_PARAMETERS, UNSHARDED_GRADIENTS, COMMUNICATION, ACTIVATIONS, LOSS, TEMPORARIES, OTHER) = range(10)  # fmt: skip
SCRATCH = len(ACCOUNTS)
"""What kernels take for themselves: beside the accounts, for it is no tensor."""
SLOTS = SCRATCH + 1
PHASES = ("forward", "backward", "optimizer")
STREAMS = ("compute", "all-gather copy-in", "all-gather", "reduce-scatter", "pre-unshard")
(COMPUTE, COPY_IN, ALL_GATHER, REDUCE_SCATTER, PRE_UNSHARD) = range(5)

Live = list[int]
Place = tuple[int, int]
"""(stack, recorded layer), or (ROOT, 0)."""
AT_ROOT: Place = (ROOT, 0)

Alive = tuple[int, int, tuple[int, ...]]
"""Storages that were born together: their account, their bytes, and their numbers where each is followed (`allocator.trace`)."""
NONE_ALIVE: Alive = (OTHER, 0, ())
Changes = tuple[tuple[int, int], ...]
"""Births and deaths in order, told at once: (name of the storage, bytes), 0 bytes for a death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What happens on a tape between two marks, by its number. Of its bytes only those are known here that do not depend on
    B and T: the gradients born in it, of the segment's own unit and of the root, and what it leaves of whole gradients.
    """

    number: int
    layer_gradients: int = 0
    root_gradients: int = 0
    net_gradients: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """The timeline at the end of one stretch: the phase, where, what is alive then, and the highest since the last point."""

    phase: str
    where: str
    live_bytes: int
    high_bytes: int
    repeats: int = 1


Spot = tuple[str, str]
"""Where in a step: the phase, and the unit or what happens there."""


class Moment(NamedTuple):
    """An instant at which a step may be at its highest: after `at` of the ledger's entries and, within a repetition, after
    `repeats` further ones of a `run`; at the highest of the stretch that follows, or, where that is None, at once.

    `live` is what schedules have made and not yet dropped, by account, `total` its sum.
    """

    at: int
    stretch: int | None
    total: int
    live: tuple[int, ...]
    spot: Spot
    run: int | None = None
    repeats: int = 0


class Repeated(NamedTuple):
    """An entry that stands for others: `entries` with how often each counts. If `accounts` are given, these alone."""

    entries: tuple[tuple[int, int], ...]
    accounts: tuple[int, ...] | None = None


@dataclass(slots=True)
class Ledger:
    """What schedules and tapes tell of births and deaths, written down in order; `course` makes figures of it.

    Nothing in it depends on B and T. What schedules make is known in bytes: `live`, by account. Of the tape the ledger has the
    order of its stretches, `entries`: their numbers, and ~n for `repeated[n]`. `whole` keeps every moment of a run and the
    timeline's points; else a run of repetitions comes to those moments which may be the highest, whatever B and T are.

    `allocator.trace.Trace` hears the same and writes down each storage.
    """

    whole: bool = False
    live: Live = field(default_factory=lambda: [0] * SLOTS)
    total: int = 0
    entries: list[int] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """The phases that have ended, by their moments: (phase, first, end)."""
    points: list[tuple[Spot, int, int, int, int]] = field(default_factory=list)
    """Ends of stretches of the timeline: (spot, entries, total, moments, repeats); repeats is 0 where a phase begins."""
    phase: str = "forward"
    where: str = ""
    own_gradients: int = 0
    root_gradients: int = 0
    fresh_gradients: int = 0
    """Gradients born on the tape that no schedule has taken yet: of the layer, of the root; and since the last mark."""
    tape_gradients: int = 0
    """What the tape has left of whole gradients; schedules that take some count them as dead, in `live`."""
    resident: Live = field(default_factory=list)
    _left_behind: tuple[Live, int] | None = None
    _risen: Moment | None = None
    """The highest since the last entry."""
    _repetitions: list[tuple[int, int]] = field(default_factory=list)

    # What schedules tell

    def born(self, account: int, held: Storages, stream: int = COMPUTE) -> Alive:
        """Storages are made, allocated on `stream`."""
        self.add(account, held.rounded)
        return account, held.rounded, ()

    def died(self, alive: Alive, used_on: int | None = None) -> None:
        """They end. `used_on` is another stream that may still use them (`Tensor.record_stream`), which holds back reuse."""
        self.add(alive[0], -alive[1])

    def turned(self, alive: Alive, account: int) -> Alive:
        """The same storages, counted elsewhere from now on."""
        self.add(alive[0], -alive[1])
        self.add(account, alive[1])
        return account, alive[1], alive[2]

    def changed(self, account: int, net_bytes: int, stream: int, *changes: Changes) -> None:
        """Many births and deaths that come to `net_bytes`, and are never higher on the way than at one end."""
        self.add(account, net_bytes)

    def gradients_of(self, place: Place) -> Alive:
        """The gradients of a unit that the tape has made."""
        if place == AT_ROOT:
            n_bytes, self.root_gradients = self.root_gradients, 0
        else:
            n_bytes, self.own_gradients = self.own_gradients, 0
        return UNSHARDED_GRADIENTS, n_bytes, ()

    def gradients_since_mark(self) -> Alive:
        n_bytes, self.fresh_gradients = self.fresh_gradients, 0
        return UNSHARDED_GRADIENTS, n_bytes, ()

    def gradient(self, parameter: int, at_root: bool, n_bytes: int) -> Alive:
        """The gradient of one parameter of the layer, or of the root."""
        return UNSHARDED_GRADIENTS, n_bytes, ()

    def all_gradients(self) -> Alive:
        """Every whole gradient there is."""
        return UNSHARDED_GRADIENTS, self.live[UNSHARDED_GRADIENTS] + self.tape_gradients, ()

    def mark(self) -> int:
        """This moment on the compute stream, to `wait` for."""
        return 0

    def wait(self, mark: int) -> None:
        """The host waits until the GPU has come to that moment."""

    # What the replay tells

    @property
    def follows_storages(self) -> bool:
        """Whether every layer must be told one by one."""
        return False

    def begin_step(self) -> None:
        """What is alive now is alive whenever a step begins."""
        self.resident = list(self.live)

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._close_rise()
        self.spans.append((phase, len(self.moments), len(self.moments)))
        if self.whole:
            self.points.append(((phase, ""), len(self.entries), self.total, len(self.moments), 0))
        self._moment(None)

    def enter(self, place: Place, where: str) -> None:
        self._close_rise()
        self.where = where

    def begin_micro_batch(self, index: int) -> None:
        """From the second on the tape brings its batch again: the last one goes."""
        if not index:
            self._left_behind = None
            return
        accounts = (ACTIVATIONS, LOSS, TEMPORARIES)
        behind = [self.resident[a] - self.live[a] if a in accounts else 0 for a in range(SLOTS)]
        self._left_behind = behind, self._repeat(self.entries, -1, accounts)
        self._enter(self._repeat(self.entries, -1, (OTHER,)))
        self.add(OTHER, self.resident[OTHER] - self.live[OTHER])

    def drop_last_loss(self) -> None:
        """The last micro-batch's loss is dropped once there is another."""
        if self._left_behind is not None:
            behind, entry = self._left_behind
            self._enter(entry)
            self._shift(behind)

    def apply(self, stretch: Stretch) -> None:
        self._close_rise()
        self._moment(stretch.number)
        self.entries.append(stretch.number)
        self.tape_gradients += stretch.net_gradients
        if stretch.layer_gradients:
            self.own_gradients += stretch.layer_gradients
            self.fresh_gradients += stretch.layer_gradients
        if stretch.root_gradients:
            self.root_gradients += stretch.root_gradients
            self.fresh_gradients += stretch.root_gradients

    def point(self, where: str, repeats: int = 1) -> None:
        """Close a stretch of the timeline."""
        self._close_rise()
        phase, begun, _ = self.spans[-1]
        self.spans[-1] = phase, begun, len(self.moments)
        if self.whole:
            self.points.append(((phase, where), len(self.entries), self.total, len(self.moments), repeats))

    # Repetitions

    def jump(self, since: Here, times: int) -> None:
        """What has happened `since` then happens so many times more; it is highest in what is told before and after."""
        self._close_rise()
        self._enter(self._repeat(self.entries[since.entries :], times))
        self._shift([(now - then) * times for now, then in zip(self.live, since.live, strict=True)])
        self.tape_gradients += (self.tape_gradients - since.tape_gradients) * times

    def here(self) -> Here:
        """For `jump`."""
        return Here(len(self.entries), tuple(self.live), self.tape_gradients)

    def repetition(self) -> None:
        """Another repetition of a run begins."""
        self._close_rise()
        self._repetitions.append((len(self.entries), len(self.moments)))

    def end_run(self) -> None:
        """The repetitions of a run are over: they make the same entries, and differ in what the schedule has alive.

        At one place of a repetition the total is a line in the number of repetitions, with a slope that B and T decide, and
        what the schedule has alive there: so it can only be highest at the corners of the upper convex hull of the latter.
        """
        self._close_rise()
        starts, self._repetitions = [*self._repetitions, (len(self.entries), len(self.moments))], []
        if self.whole or len(starts) < 3:
            return
        begun, first = starts[0]
        pattern = self.entries[begun : starts[1][0]]
        run = self._repeat(pattern, 1)
        places: defaultdict[tuple[int, int | None], list[tuple[int, int, Moment]]] = defaultdict(list)
        for repeats, ((entry, moment), (_, end)) in enumerate(pairwise(starts)):
            for index in range(moment, end):
                m = self.moments[index]
                places[m.at - entry, m.stretch].append((repeats, index, m))
        kept = sorted((corner for place in places.values() for corner in _corners(place)), key=lambda c: c[1])
        self.moments[first:] = [
            m._replace(at=m.at - starts[repeats][0] + begun, run=run, repeats=repeats) for repeats, _, m in kept
        ]
        del self.entries[starts[1][0] :]
        self._enter(self._repeat(pattern, len(starts) - 2))
        phase, begun, _ = self.spans[-1]
        self.spans[-1] = phase, begun, len(self.moments)

    # Writing down

    def add(self, account: int, n_bytes: int) -> None:
        """A birth; negative for a death."""
        self.live[account] += n_bytes
        self.total += n_bytes
        if n_bytes > 0 and (self._risen is None or self.total > self._risen.total):
            self._risen = self._now(None)

    def _close_rise(self) -> None:
        if self._risen is not None:
            self.moments.append(self._risen)
            self._risen = None

    def _moment(self, stretch: int | None) -> None:
        self.moments.append(self._now(stretch))

    def _now(self, stretch: int | None) -> Moment:
        return Moment(len(self.entries), stretch, self.total, tuple(self.live), (self.phase, self.where))

    def _enter(self, entry: int) -> None:
        self._close_rise()
        self.entries.append(entry)

    def _repeat(self, entries: list[int], times: int, accounts: tuple[int, ...] | None = None) -> int:
        self.repeated.append(Repeated(tuple((e, n * times) for e, n in Counter(entries).items()), accounts))
        return ~(len(self.repeated) - 1)

    def _shift(self, by: Live) -> None:
        """Move without looking for a peak on the way."""
        self.live = [a + b for a, b in zip(self.live, by, strict=True)]
        self.total += sum(by)


@dataclass(frozen=True, slots=True)
class Here:
    """How far a ledger has come."""

    entries: int
    live: tuple[int, ...]
    tape_gradients: int


def _corners(place: list[tuple[int, int, Moment]]) -> list[tuple[int, int, Moment]]:
    """Of the moments at one place of a run, those on the upper hull of (repetition, total); the first of several alike."""
    hull: list[tuple[int, int, Moment]] = []
    for at in place:
        x, y = at[0], at[2].total
        while hull:
            x1, y1 = hull[-1][0], hull[-1][2].total
            if x1 == x:
                if y1 >= y:
                    break
            elif len(hull) == 1:
                hull.append(at)
                break
            else:
                x0, y0 = hull[-2][0], hull[-2][2].total
                if (x1 - x0) * (y - y0) < (y1 - y0) * (x - x0):
                    hull.append(at)
                    break
            hull.pop()
        else:
            hull.append(at)
    return hull
