"""A snapshot of PyTorch's caching allocator, as `torch.cuda.memory._dump_snapshot` writes it, in a compact form.

Format: torch/csrc/cuda/Module.cpp, THCPModule_memorySnapshot (2.4 to 2.13), and torch/cuda/memory.py, `_snapshot`. Keys that
only newer versions write are optional: `time_us`, `pool_id`, `is_expandable`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple

from fsdp_advisor.diagnosis.pickle_reader import read_pickle

ACTIONS = (
    "alloc", "free_requested", "free_completed", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom",
)  # fmt: skip
"""The actions of events. Source: THCPModule_memorySnapshot, action_to_str; only torch 1.13 has `free`."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED, FREE, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, _, OOM = range(10)
FREES = (FREE_COMPLETED, FREE)
_CODES = {action: code for code, action in enumerate(ACTIONS)}
NO_STACK = 0
"""The id of the empty stack."""


class NotASnapshot(ValueError):
    """The pickle contains something other than a snapshot."""


class Frame(NamedTuple):
    """One frame of a stack: Python's, or C++'s if the history was recorded with `stacks="all"`."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """A block of a segment. `state` is `active_allocated`, `active_awaiting_free` or `inactive`; `stack` allocated it."""

    address: int
    size: int
    requested: int
    state: str
    stack: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """Memory that the allocator got from the driver."""

    device: int
    total_bytes: int
    blocks: tuple[Block, ...]
    expandable: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The recorded events of one device, in order, one array per column. In the row of an
    out-of-memory event, `addresses` has the bytes that the driver had free instead of an address.
    """

    actions: array[int] = field(default_factory=lambda: array("B"))
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    stacks: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Segments at the time of the dump, the events before it by device, and every stack that they name."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[Trace, ...]
    stacks: Sequence[tuple[Frame, ...]]

    @property
    def devices(self) -> list[int]:
        """The devices that have memory or events."""
        traced = {device for device, trace in enumerate(self.traces) if len(trace)}
        return sorted(traced | {segment.device for segment in self.segments})


def read_snapshot(data: mmap | bytes) -> Snapshot:
    """The snapshot in a pickle. Raises PickleRefused, and NotASnapshot for a pickle of something else.

    It takes about 80 bytes of memory per event, and stores each different stack once.
    """
    stacks = _Stacks()
    content = read_pickle(data, stacks.compact)
    if isinstance(content, list):  # torch.cuda.memory_snapshot(): segments only
        content = {"segments": content, "device_traces": []}
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise NotASnapshot("the pickle has no segments")
    try:
        return Snapshot(
            segments=tuple(map(_segment, content["segments"])),
            traces=tuple(_trace(events) for events in content.get("device_traces") or ()),
            stacks=tuple(stacks.frames),
        )
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise NotASnapshot(f"the pickle is not a snapshot of PyTorch's allocator ({error})") from error


class _Stacks:
    """Collects the stacks while the pickle is read, and compacts events and blocks, which refer to them."""

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, ...]] = [()]
        self._ids: dict[tuple[Frame, ...], int] = {(): NO_STACK}
        self._known: dict[int, tuple[Any, int]] = {}
        self._frames: dict[Frame, Frame] = {}

    def compact(self, items: list[Any]) -> list[Any]:
        """Events as one Trace, and blocks as Blocks; other items unchanged."""
        first = items[0] if items else None
        if isinstance(first, dict):
            if "action" in first:
                return [self._events(items)]
            if "state" in first and "size" in first:
                return [self._block(block) for block in items]
        return items

    def _events(self, events: list[dict[str, Any]]) -> Trace:
        trace = Trace()
        for event in events:
            action = _CODES.get(_text(event["action"]))
            if action is None:
                continue
            trace.actions.append(action)
            trace.addresses.append(event.get("addr", event.get("device_free", 0)))
            trace.sizes.append(event["size"])
            trace.stacks.append(self._stack(event.get("frames")))
        return trace

    def _block(self, block: dict[str, Any]) -> Block:
        frames, requested = block.get("frames"), block.get("requested_size")
        history = block.get("history")  # torch 2.0
        if history:
            frames = frames or history[0].get("frames")
            requested = requested if requested is not None else history[0].get("real_size")
        size = int(block["size"])
        return Block(
            block.get("address", 0),
            size,
            size if requested is None else requested,
            _text(block["state"]),
            self._stack(frames),
        )

    def _stack(self, frames: Any) -> int:
        """The id of a list of frames."""
        if not frames:
            return NO_STACK
        known = self._known.get(id(frames))
        if known is not None:
            return known[1]
        stack = tuple(map(self._frame, frames))
        number = self._ids.setdefault(stack, len(self.frames))
        if number == len(self.frames):
            self.frames.append(stack)
        self._known[id(frames)] = (frames, number)  # keeps the list alive, so that its id is not reused
        return number

    def _frame(self, frame: dict[str, Any]) -> Frame:
        found = Frame(_text(frame["filename"]), int(frame["line"]), _text(frame["name"]))
        return self._frames.setdefault(found, found)


def _text(value: Any) -> str:
    """The value if it is text, else raises TypeError. The message leaves the value out, because a forged one may be too large to print."""
    if not isinstance(value, str):
        raise TypeError("text is expected")
    return value


def _segment(segment: dict[str, Any]) -> SnapshotSegment:
    address = int(segment.get("address", 0))
    blocks = []
    for block in segment["blocks"]:
        # torch 2.0 has no addresses of blocks
        blocks.append(block if block.address else block._replace(address=address))
        address += block.size
    return SnapshotSegment(
        device=int(segment.get("device", 0)),
        total_bytes=int(segment["total_size"]),
        blocks=tuple(blocks),
        expandable=bool(segment.get("is_expandable", False)),
    )


def _trace(batches: list[Trace]) -> Trace:
    """The batches of one device as one trace."""
    whole = Trace()
    while batches:
        batch = batches.pop(0)
        for mine, more in _columns(whole, batch):
            mine.extend(more)
    return whole


def _columns(whole: Trace, batch: Trace) -> Iterator[tuple[array[int], array[int]]]:
    for name in ("actions", "addresses", "sizes", "stacks"):
        yield getattr(whole, name), getattr(batch, name)
