"""What is alive on rank 0, by account, and the highest it has been."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_advisor.memory.held import Held
from fsdp_advisor.models.profile import ROOT

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


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a tape between two marks, at given B and T: what it leaves behind, and its highest point.

    `net` and `high` are bytes by account, relative to the block's beginning: `net` of the accounts that it changes, `high` of all.
    `high_total` is the sum of `high`.
    `layer_gradients` and `root_gradients` are the gradients born in it, of the segment's own unit and of the root.
    `events` is where it stands on the tape: (segment, first event, end).
    """

    net: tuple[tuple[int, int], ...]
    high: tuple[int, ...]
    high_total: int
    layer_gradients: int = 0
    root_gradients: int = 0
    events: tuple[int, int, int] = (0, 0, 0)


def changed(live: Live) -> tuple[tuple[int, int], ...]:
    """The accounts that are not where they were, with their bytes.

    >>> changed([0, 512, 0])
    ((1, 512),)
    """
    return tuple((account, n_bytes) for account, n_bytes in enumerate(live) if n_bytes)


@dataclass(frozen=True, slots=True)
class Point:
    """The timeline at the end of one stretch: the phase, where, what is alive then, and the highest since the last point."""

    phase: str
    where: str
    live_bytes: int
    high_bytes: int
    repeats: int = 1


@dataclass(slots=True)
class Ledger:
    """What schedules and tapes tell of births and deaths, added up. Bytes, by account.

    `allocator.trace.Trace` hears the same and writes down each storage.
    """

    live: Live = field(default_factory=lambda: [0] * SLOTS)
    total: int = 0
    peak: int = 0
    at_peak: Live = field(default_factory=lambda: [0] * SLOTS)
    peak_phase: str = "forward"
    peak_where: str = ""
    phase: str = "forward"
    where: str = ""
    phase_peaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    timeline: list[Point] = field(default_factory=list)
    high: int = 0
    """The highest total since the last point of the timeline."""
    own_gradients: int = 0
    root_gradients: int = 0
    fresh_gradients: int = 0
    """Gradients born on the tape that no schedule has taken yet: of the layer, of the root; and since the last mark."""
    resident: Live = field(default_factory=list)
    left_behind: Live = field(default_factory=list)

    # What schedules tell

    def born(self, account: int, held: Held, stream: int = COMPUTE) -> Alive:
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
        return UNSHARDED_GRADIENTS, self.live[UNSHARDED_GRADIENTS], ()

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
        self.phase, self.high = phase, self.total
        if self.total > self.peak:
            self._new_peak(self.total, list(self.live))

    def enter(self, place: Place, where: str) -> None:
        self.where = where

    def begin_micro_batch(self, index: int) -> None:
        """From the second on the tape brings its batch again: the last one goes."""
        self.left_behind = [0] * len(self.live)
        if index:
            for account in (ACTIVATIONS, LOSS, TEMPORARIES):
                self.left_behind[account] = self.resident[account] - self.live[account]
            self.add(OTHER, self.resident[OTHER] - self.live[OTHER])

    def drop_last_loss(self) -> None:
        """The last micro-batch's loss is dropped once there is another."""
        self.shift(self.left_behind)

    def apply(self, block: Block) -> None:
        reached = self.total + block.high_total
        if reached > self.high:
            self.high = reached
            if reached > self.peak:
                self._new_peak(reached, [a + b for a, b in zip(self.live, block.high, strict=True)])
        self.move(block)
        if block.layer_gradients:
            self.own_gradients += block.layer_gradients
            self.fresh_gradients += block.layer_gradients
        if block.root_gradients:
            self.root_gradients += block.root_gradients
            self.fresh_gradients += block.root_gradients

    def point(self, where: str, repeats: int = 1) -> None:
        """Close a stretch of the timeline."""
        self.timeline.append(Point(self.phase, where, self.total, self.high, repeats))
        self.phase_peaks[self.phase] = max(self.phase_peaks[self.phase], self.high)
        self.high = self.total

    # Adding up

    def add(self, account: int, n_bytes: int) -> None:
        """A birth; negative for a death."""
        self.live[account] += n_bytes
        self.total += n_bytes
        if self.total > self.high:
            self.high = self.total
            if self.total > self.peak:
                self._new_peak(self.total, list(self.live))

    def move(self, block: Block) -> None:
        """To the end of a block, without looking for a peak on the way."""
        live = self.live
        for account, n_bytes in block.net:
            live[account] += n_bytes
            self.total += n_bytes

    def shift(self, net: Live, times: int = 1) -> None:
        """Move by `net` as often as given, without looking for a peak on the way."""
        live = self.live
        for account, n_bytes in enumerate(net):
            if n_bytes:
                live[account] += n_bytes * times
                self.total += n_bytes * times

    def _new_peak(self, total: int, live: Live) -> None:
        self.peak, self.at_peak, self.peak_phase, self.peak_where = total, live, self.phase, self.where
