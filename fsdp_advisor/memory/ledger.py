"""What is alive on rank 0, by account, and the highest it has been."""

from __future__ import annotations

from dataclasses import dataclass, field

ACCOUNTS = (
    "parameters",  # the shard that is kept
    "gradients",  # the shard that is kept, or DDP's whole gradients
    "optimizer",
    "unsharded_parameters",  # gathered units; autocast's copies of weights
    "unsharded_gradients",
    "communication",  # inputs and outputs of collectives, buckets
    "activations",
    "loss",
    "temporaries",
    "other",  # the batch, buffers
)
(PARAMETERS, GRADIENTS, OPTIMIZER, UNSHARDED_PARAMETERS, UNSHARDED_GRADIENTS, COMMUNICATION, ACTIVATIONS, LOSS, TEMPORARIES, OTHER) = range(10)  # fmt: skip
PHASES = ("forward", "backward", "optimizer")

Live = list[int]


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a tape between two marks, at given B and T: what it leaves behind, and its highest point.

    `net` and `high` are bytes by account, relative to the block's beginning; `high_total` is the sum of `high`.
    `layer_gradients` and `root_gradients` are the gradients born in it, of the segment's own unit and of the root.
    """

    net: tuple[int, ...]
    high: tuple[int, ...]
    high_total: int
    layer_gradients: int = 0
    root_gradients: int = 0


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
    """Adds up births and deaths. Bytes, by account."""

    live: Live = field(default_factory=lambda: [0] * len(ACCOUNTS))
    total: int = 0
    peak: int = 0
    at_peak: Live = field(default_factory=lambda: [0] * len(ACCOUNTS))
    peak_phase: str = "forward"
    peak_where: str = ""
    phase: str = "forward"
    where: str = ""
    phase_peaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    timeline: list[Point] = field(default_factory=list)
    high: int = 0
    """The highest total since the last point of the timeline."""

    def add(self, account: int, n_bytes: int) -> None:
        """A birth; negative for a death."""
        self.live[account] += n_bytes
        self.total += n_bytes
        if self.total > self.high:
            self.high = self.total
            if self.total > self.peak:
                self._new_peak(self.total, list(self.live))

    def apply(self, block: Block) -> None:
        reached = self.total + block.high_total
        if reached > self.high:
            self.high = reached
            if reached > self.peak:
                self._new_peak(reached, [a + b for a, b in zip(self.live, block.high, strict=True)])
        self.shift(block.net)

    def shift(self, net: tuple[int, ...] | Live, times: int = 1) -> None:
        """Move by `net` as often as given, without looking for a peak on the way."""
        live = self.live
        for account, n_bytes in enumerate(net):
            if n_bytes:
                live[account] += n_bytes * times
                self.total += n_bytes * times

    def begin(self, phase: str) -> None:
        self.phase, self.high = phase, self.total
        if self.total > self.peak:
            self._new_peak(self.total, list(self.live))

    def point(self, where: str, repeats: int = 1) -> None:
        """Close a stretch of the timeline."""
        self.timeline.append(Point(self.phase, where, self.total, self.high, repeats))
        self.phase_peaks[self.phase] = max(self.phase_peaks[self.phase], self.high)
        self.high = self.total

    def _new_peak(self, total: int, live: Live) -> None:
        self.peak, self.at_peak, self.peak_phase, self.peak_where = total, live, self.phase, self.where
