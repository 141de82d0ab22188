"""Replay the visits of `coordinator` in a step program: the allocations and frees of ZeRO-3's gathered parameters."""

from __future__ import annotations

from fsdp_advisor.engines.deepspeed.coordinator import GatherChange, Gathered, GatherVisit
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import BufferId
from fsdp_advisor.program.storages import Storages


class Gathering:
    """Allocates and frees gathered parameters. While a unit runs, they are at the peak of its visit.

    The root's own modules between and after the stacks have no hook on the tape. They are visited with the layer before them
    (forward) or after them (backward). Stages 1 and 2 have no visits, so they allocate nothing here.

    Buffers and parameters are allocated on the all-gather stream. Parameters are used on the compute stream and freed after
    `record_stream`. The host runs ahead without limit; the GPU is assumed to keep up with it.
    Source: zero/partitioned_param_coordinator.py, __all_gather_params, fetch_sub_module; partition_parameters.py, free_param.
    """

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered
        self._buffers: dict[int, BufferId] = {}
        self._falling: tuple[GatherChange, ...] = ()  # changes of the last visit that are not applied yet
        self._visits = iter(gathered.forward)
        self._upcoming: GatherVisit | None = None
        self._current: GatherVisit | None = None
        self._head: GatherVisit | None = None  # the first visit of backward
        self._bytes = 0  # bytes of the all-gathers since the last call of `take_bytes`

    @property
    def holds_parameters(self) -> bool:
        """Whether any parameter is gathered now."""
        return bool(self._buffers)

    def begin_forward(self) -> None:
        self._turn_to(self._gathered.forward)

    def begin_backward(self) -> None:
        self._turn_to(self._gathered.backward)
        self._head = self._upcoming

    def enter(self, step: StepBuilder, unit: UnitId) -> None:
        """Begin a unit's visit, after those of the root's modules before it that have no hook."""
        while self._upcoming is not None:
            self._current = self._upcoming
            self._upcoming = next(self._visits, None)
            self._apply(step, self._current.rising)
            self._falling = self._current.falling
            self._bytes += self._current.gathered_bytes
            if self._current.unit == unit:
                return

    def leave(self, step: StepBuilder, unit: UnitId) -> None:
        """End a unit's forward. The root's visit after a stack ends immediately: the head's parameters are freed before the loss
        allocates its tensors.
        """
        if self._current is None:
            return
        self._apply(step)
        if unit != AT_ROOT and self._upcoming is not None and self._upcoming.unit.is_outside_layers:
            self.enter(step, AT_ROOT)
            self._apply(step)

    def enter_head(self, step: StepBuilder) -> None:
        """Visit the head in backward. This happens after the loss's backward, with the first gradient."""
        if self._head is not None and self._upcoming is self._head:
            self.enter(step, AT_ROOT)

    def end(self, step: StepBuilder) -> None:
        """Run the remaining visits of backward: the embedding's."""
        while self._upcoming is not None:
            self.enter(step, self._upcoming.unit)

    def drop(self, step: StepBuilder) -> None:
        """Free all gathered parameters at the end of backward."""
        self._apply(step, self._gathered.end)

    def take_bytes(self) -> int:
        """Bytes of the parameters whose all-gathers began since the last call."""
        n_bytes, self._bytes = self._bytes, 0
        return n_bytes

    def _turn_to(self, visits: tuple[GatherVisit, ...]) -> None:
        self._visits = iter(visits)
        self._upcoming = next(self._visits, None)
        self._current = self._head = None

    def _apply(self, step: StepBuilder, changes: tuple[GatherChange, ...] = ()) -> None:
        """Apply the remaining changes of the last visit, then `changes`."""
        for storage, n_bytes in (*self._falling, *changes):
            if n_bytes:
                self._buffers[storage] = step.alloc(
                    Account.UNSHARDED_PARAMETERS, Storages.of(n_bytes), Stream.ALL_GATHER
                )
            else:
                step.free(self._buffers.pop(storage))
        self._falling = ()
