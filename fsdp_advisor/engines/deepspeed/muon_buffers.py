"""Buffers of the all-gathers of DeepSpeed's Muon, and the variables that refer to its tensors.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, _partitioned_buffers_all_gather; stage_1_and_2.py, _muon_all_gather_partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import NO_BUFFER, BufferId
from fsdp_advisor.program.storages import Storages

MOST_KEPT_BYTES = 256 * 1024**2
"""The most bytes of buffers of all-gathers that stay allocated (`_muon_allgather_max_cached_bytes`)."""


class Gather(NamedTuple):
    """An all-gather of `elements` elements of a rank, of each of `tensors` tensors. DeepSpeed keeps its buffers by these."""

    elements: int
    tensors: int = 1


def gather_buffers(gather: Gather, ranks: int, element_bytes: int) -> Storages:
    """The buffers of an all-gather: what a rank receives, and what it sends."""
    sent = element_bytes * gather.elements * gather.tensors
    return Storages.of(ranks * sent) + Storages.of(sent)


def kept_gathers(gathers: Iterable[Gather], ranks: int, element_bytes: int) -> tuple[Gather, ...]:
    """The all-gathers whose buffers stay allocated after these, the last used last."""
    kept: dict[Gather, int] = {}
    for gather in gathers if ranks > 1 else ():
        n_bytes = kept.pop(gather, 0) or gather_buffers(gather, ranks, element_bytes).exact
        if n_bytes <= MOST_KEPT_BYTES:
            while sum(kept.values()) + n_bytes > MOST_KEPT_BYTES:
                del kept[next(iter(kept))]
            kept[gather] = n_bytes
    return tuple(kept)


class GatherCache:
    """The buffers of the all-gathers of one step. `frees_first`: whether old buffers are freed before new ones are allocated."""

    def __init__(self, ranks: int, element_bytes: int, *, frees_first: bool = False) -> None:
        self._ranks, self._element_bytes, self._frees_first = ranks, element_bytes, frees_first
        self._kept: dict[Gather, BufferId] = {}  # the last used last

    def begin_step(self, step: StepBuilder, kept: Iterable[Gather]) -> None:
        """Allocate the buffers that stay from step to step."""
        for gather in kept:
            self._kept[gather] = step.alloc_in_first_step(Account.COMMUNICATION, self._buffers(gather))

    def use(self, step: StepBuilder, gather: Gather) -> BufferId:
        """Take the buffers of an all-gather. Those that do not stay are returned, for the caller to free."""
        used, storages = self._kept.pop(gather, NO_BUFFER), self._buffers(gather)
        is_kept = storages.exact <= MOST_KEPT_BYTES
        if used == NO_BUFFER and self._frees_first:
            self._make_room(step, storages.exact)
        if used == NO_BUFFER:
            used = step.alloc(Account.COMMUNICATION, storages)
        if not is_kept:
            return used
        self._make_room(step, storages.exact)
        self._kept[gather] = used
        return NO_BUFFER

    def _make_room(self, step: StepBuilder, n_bytes: int) -> None:
        while self._kept and n_bytes + sum(self._buffers(each).exact for each in self._kept) > MOST_KEPT_BYTES:
            step.free(self._kept.pop(next(iter(self._kept))))

    def _buffers(self, gather: Gather) -> Storages:
        return gather_buffers(gather, self._ranks, self._element_bytes)


class Variables:
    """The storages of temporaries by the variable that refers to them."""

    def __init__(self) -> None:
        self._buffers: dict[str, BufferId] = {}

    def assign(self, step: StepBuilder, name: str, storages: Storages) -> None:
        """Let a variable refer to new storages, and free those that it referred to."""
        new = step.alloc(Account.TEMPORARIES, storages)
        self.move(step, name, new)

    def move(self, step: StepBuilder, name: str, buffer: BufferId) -> None:
        """Let a variable refer to allocated storages, and free those that it referred to."""
        step.free(self._buffers.get(name, NO_BUFFER))
        self._buffers[name] = buffer

    def clear(self, step: StepBuilder) -> None:
        step.free(*self._buffers.values())
        self._buffers = {}
