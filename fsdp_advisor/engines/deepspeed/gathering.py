"""What ZeRO-3 has gathered as a step goes on: the visits of `memory.deepspeed_zero3`, one unit's turn after the other."""

from __future__ import annotations

from fsdp_advisor.engines.deepspeed.coordinator import Gathered, Visit
from fsdp_advisor.memory.ledger import ALL_GATHER, AT_ROOT, UNSHARDED_PARAMETERS, Changes, Ledger, Place
from fsdp_advisor.model.profile import ROOT


class Gathering:
    """The level of gathered parameters: a unit's highest during its turn, wherever in it the tape is at its highest.

    The root's own modules between and after the stacks have no hook on the tape: their turn comes with that of the layer
    before (forward) or after (backward). Stages 1 and 2 have no visits, and nothing happens here.

    Buffers and parameters are allocated on the all-gather stream. A parameter's storage is then used on the compute stream
    and freed with `record_stream`; nothing bounds how far the host runs ahead, and the GPU is taken to keep up with it.
    Source: zero/partitioned_param_coordinator.py, __all_gather_params, fetch_sub_module; partition_parameters.py, free_param.
    """

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered
        self._level = 0
        self._falling: Changes = ()  # of the last turn, not yet told
        self._visits = iter(gathered.forward)
        self._upcoming: Visit | None = None
        self._current: Visit | None = None
        self._head: Visit | None = None  # the first turn of backward

    def begin_forward(self) -> None:
        self._turn_to(self._gathered.forward)

    def begin_backward(self) -> None:
        self._turn_to(self._gathered.backward)
        self._head = self._upcoming

    def enter(self, ledger: Ledger, place: Place) -> None:
        """A unit's turn, and before it those of the root that nothing has announced."""
        while self._upcoming is not None:
            self._current = self._upcoming
            self._upcoming = next(self._visits, None)
            self._set(ledger, self._current.high_bytes, self._current.rising)
            self._falling = self._current.falling
            if self._current.place == place or (self._current.place[0] == ROOT and place == AT_ROOT):
                return

    def leave(self, ledger: Ledger, place: Place) -> None:
        """The end of a unit's forward. The root's turn after a stack is over at once: what the head gathers is given back
        before the loss makes its tensors.
        """
        if self._current is None:
            return
        self._set(ledger, self._current.after_bytes)
        if place != AT_ROOT and self._upcoming is not None and self._upcoming.place[0] == ROOT:
            self.enter(ledger, AT_ROOT)
            self._set(ledger, self._current.after_bytes)

    def enter_head(self, ledger: Ledger) -> None:
        """The head's turn in backward comes when the loss's backward is over; the first gradient tells."""
        if self._head is not None and self._upcoming is self._head:
            self.enter(ledger, AT_ROOT)

    def end(self, ledger: Ledger) -> None:
        """What is left of backward: the embedding's turn."""
        while self._upcoming is not None:
            self.enter(ledger, self._upcoming.place)

    def drop(self, ledger: Ledger) -> None:
        """With the end of backward everything is given back."""
        self._set(ledger, 0, self._gathered.end)

    def _turn_to(self, visits: tuple[Visit, ...]) -> None:
        self._visits = iter(visits)
        self._upcoming = next(self._visits, None)
        self._current = self._head = None

    def _set(self, ledger: Ledger, n_bytes: int, changes: Changes = ()) -> None:
        """To another level: what is left of the last turn, then `changes`."""
        if n_bytes != self._level or changes or self._falling:
            ledger.changed(UNSHARDED_PARAMETERS, n_bytes - self._level, ALL_GATHER, self._falling, changes)
            self._level, self._falling = n_bytes, ()
