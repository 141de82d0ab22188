"""The events of a step while it runs: storages, the segments between boundaries of layers, and the marks of units."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from fsdp_advisor.model.tape import ROOT, Category, Op, TapePhase
from fsdp_advisor.recording.raw_steps import RawSegment, RawStep, RawStorage, frees_in_order
from fsdp_advisor.recording.scoring import scoring_phase
from fsdp_advisor.recording.tiles import current_parts, current_tile


class StepEvents:
    """The events of a step so far. `StorageWatch` and the hooks of modules report to it.

    `phase`: "forward" until the loss's backward begins. `in_loss`: whether the head or the loss runs.
    """

    def __init__(self, *, lists_recomputed: bool) -> None:
        """`lists_recomputed`: whether a layer's backward lists the work that repeats a forward."""
        self._lists_recomputed = lists_recomputed
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.phase: TapePhase = "forward"
        self.in_loss = False
        self._segments = [RawSegment("forward", ROOT, 0)]
        self._storages: list[RawStorage] = []
        self._alive: dict[int, int] = {}  # storage's address -> its number
        self._seen: set[Hashable] = set()

    @property
    def segment(self) -> RawSegment:
        """The segment that runs now."""
        return self._segments[-1]

    @property
    def forward_phase(self) -> TapePhase:
        """The phase of a forward that runs now."""
        return scoring_phase() or "forward"

    def is_first(self, what: Hashable) -> bool:
        """Whether this is the first call with `what` in the step."""
        is_new = what not in self._seen
        self._seen.add(what)
        return is_new

    # Boundaries

    def begin(self, phase: TapePhase, stack: int, layer: int) -> None:
        """Begin a segment."""
        self._segments.append(RawSegment(phase, stack, layer))
        if self._lists_recomputed and phase == "backward" and stack != ROOT:
            self.segment.recomputed = []

    def begin_root(self) -> None:
        """Begin the root's code of another forward."""
        self.begin(self.forward_phase, ROOT, 0)
        self.in_loss = False

    def begin_backward(self) -> None:
        """Begin the backward of the loss."""
        self.phase = "backward"
        self.begin("backward", ROOT, 0)

    def mark(self, op: Op, a: int, b: int = 0) -> None:
        """Record a mark: `op` and its two arguments."""
        self.segment.events.append((op, int(a), b))

    # Storages

    def allocate(self, key: int, n_bytes: int, category: int) -> None:
        """Record the allocation of the storage at the address `key`. A temporary one may turn out to be an activation."""
        tile = current_tile()
        self._alive[key] = self._add(
            RawStorage(
                0 if tile is not None else n_bytes,
                category,
                self.phase,
                tiled=None if tile is None else tile.size_of(n_bytes),
                parts=current_parts(),
            )
        )

    def free(self, key: int) -> None:
        """Record that the storage at the address `key` is freed, if the step allocated it."""
        number = self._alive.pop(key, None)
        if number is None:
            return
        storage = self._storages[number]
        if storage.phase != self.phase:
            storage.outlives_phase()
        self.segment.events.append((Op.FREE, number, 0))

    def stage(self, rows: int, columns: int) -> None:
        """Record the workspace of a sum over rows on a GPU: allocated before the sum and freed after it."""
        number = self._add(RawStorage(rows, Category.SCRATCH, self.phase, columns=columns))
        self.segment.events.append((Op.FREE, number, 0))

    def storage_of(self, tensor: torch.Tensor) -> RawStorage | None:
        """The storage behind a tensor, if the step allocated it."""
        number = self._alive.get(tensor.untyped_storage()._cdata)
        return None if number is None else self._storages[number]

    def _add(self, storage: RawStorage) -> int:
        number = len(self._storages)
        self._storages.append(storage)
        self.segment.events.append((Op.ALLOC, number, 0))
        return number

    def raw_step(self) -> RawStep:
        """The recorded step."""
        for number in self._alive.values():
            self._storages[number].outlives_phase()
        for segment in self._segments:
            segment.events = frees_in_order(segment.events)
        return RawStep(self._segments, self._storages)
