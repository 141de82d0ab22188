"""Finds the storages that are alive at one moment of a trace, from the events before it and the segments at its end.

An allocation that is missing in the trace was made before recording began, or its event was dropped because the trace was full. It is
alive if a later event frees it, or if it is still in a segment at the time of the dump.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.diagnosis.snapshot import (
    ALLOC,
    FREES,
    NO_STACK,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Snapshot,
    SnapshotSegment,
    Trace,
)
from fsdp_advisor.program.storages import round_up

NEVER = -1


@dataclass(frozen=True, slots=True)
class Live:
    """A live storage.

    `event`: the index of its allocation in the trace, None if the trace does not have it. `freed`: the index of its free, NEVER if it is
    not freed.
    """

    n_bytes: int
    stack: int
    event: int | None
    freed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The storages that are alive just before event `at`, and the allocator's reserved bytes.

    `at`: the index of an event; the length of the trace means the moment of the dump.
    """

    at: int
    live: tuple[Live, ...]
    reserved_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return sum(item.n_bytes for item in self.live)


def segments_of(snapshot: Snapshot, device: int) -> tuple[SnapshotSegment, ...]:
    """The segments of one GPU."""
    return tuple(segment for segment in snapshot.segments if segment.device == device)


def moment_of(trace: Trace, segments: Sequence[SnapshotSegment]) -> int:
    """The event to explain: the last out-of-memory error, else the one after the peak, else the end."""
    errors = [at for at, action in enumerate(trace.actions) if action == OOM]
    if errors:
        return errors[-1]
    earlier, _ = _earlier(trace, segments)
    now = highest = sum(item.n_bytes for item in earlier)
    sizes: dict[int, int] = {}
    peak = 0
    for at, action in enumerate(trace.actions):
        address = trace.addresses[at]
        if action == ALLOC:
            sizes[address] = round_up(trace.sizes[at])
            now += sizes[address]
        elif action in FREES:
            now -= sizes.pop(address, round_up(trace.sizes[at]))
        if now > highest:
            highest, peak = now, at + 1
    return peak


def alive_at(trace: Trace, segments: Sequence[SnapshotSegment], moment: int) -> Alive:
    """The storages that are alive before event `moment`."""
    earlier, freed = _earlier(trace, segments)
    made = [
        Live(round_up(trace.sizes[at]), trace.stacks[at], at, freed[at])
        for at in range(moment)
        if trace.actions[at] == ALLOC
    ]
    live = [item for item in (*earlier, *made) if item.freed == NEVER or item.freed >= moment]
    reserved = sum(segment.total_bytes for segment in segments)
    for at in range(moment, len(trace)):
        if trace.actions[at] in (SEGMENT_ALLOC, SEGMENT_MAP):
            reserved -= trace.sizes[at]
        elif trace.actions[at] in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved += trace.sizes[at]
    return Alive(at=moment, live=tuple(live), reserved_bytes=max(reserved, sum(item.n_bytes for item in live)))


def _earlier(trace: Trace, segments: Sequence[SnapshotSegment]) -> tuple[list[Live], array[int]]:
    """The storages that were alive before the trace began, and the `lifetimes` of those in it."""
    earlier: list[Live] = []
    current: dict[int, int] = {}
    freed = array("q", [NEVER]) * len(trace)
    for at, action in enumerate(trace.actions):
        address = trace.addresses[at]
        if action == ALLOC:
            current[address] = at
        elif action in FREES:
            event = current.pop(address, None)
            if event is None:
                earlier.append(Live(round_up(trace.sizes[at]), NO_STACK, None, at))
            else:
                freed[event] = at
    earlier += [
        Live(round_up(block.requested), block.stack, None, NEVER)
        for segment in segments
        for block in segment.blocks
        if block.state != "inactive" and block.address not in current
    ]
    return earlier, freed


def lifetimes(trace: Trace) -> array[int]:
    """By event, the index of the event that frees its allocation; NEVER for allocations that are not freed and for other events."""
    return _earlier(trace, ())[1]
