"""Muon's updates under ZeRO-3, which replace the gradients in the ranks' shards when the optimizer step begins.

The gradients of a chunk of matrices are gathered, and their momentum. In rounds each rank updates one matrix, and the ranks exchange the
updates and the momentum. Then every rank copies its own shards back.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, _apply_muon_to_accumulated_grads, _muon_update_sub_group,
_partitioned_buffers_all_gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.deepspeed_muon import update_flops, update_temporaries
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import NO_BUFFER, BufferId
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MOST_KEPT_BYTES = 256 * 1024**2
"""The most bytes of buffers of all-gathers that stay allocated (`_muon_allgather_max_cached_bytes`)."""

_EXCHANGED = ("gradient", "momentum")


class Round(NamedTuple):
    """The matrices that the ranks update at the same time, one each. Rank 0 updates the first."""

    matrices: tuple[Parameter, ...]
    is_uniform: bool
    """Whether every rank has one, all of the same shape. If not, the ranks exchange padded copies."""

    @property
    def largest(self) -> int:
        return max(p.elements for p in self.matrices)


class Chunk(NamedTuple):
    """Matrices whose gradients and momentum are whole at the same time. `shards`: elements that each rank has of each."""

    rounds: tuple[Round, ...]
    shards: tuple[int, ...]


def chunks(matrices: Iterable[Parameter], ranks: int, bucket_elements: int) -> Iterator[Chunk]:
    """The chunks of a sub-group: as many matrices as fit into the bucket, but at least one."""
    chunk: list[Parameter] = []
    elements = 0
    for matrix in matrices:
        if chunk and elements + matrix.elements > bucket_elements:
            yield _chunk(chunk, ranks)
            chunk, elements = [], 0
        chunk.append(matrix)
        elements += matrix.elements
    if chunk:
        yield _chunk(chunk, ranks)


def _chunk(matrices: list[Parameter], ranks: int) -> Chunk:
    rounds = (tuple(matrices[at : at + ranks]) for at in range(0, len(matrices), ranks))
    return Chunk(
        tuple(Round(each, len(each) == ranks and len({p.shape for p in each}) == 1) for each in rounds),
        tuple(-(-p.elements // ranks) for p in matrices),
    )


def gather_buffers(shards: int, ranks: int, element_bytes: int) -> Storages:
    """The buffers of an all-gather of `shards` elements of each rank: what a rank receives, and what it sends."""
    return Storages.of(element_bytes * ranks * shards) + Storages.of(element_bytes * shards)


def kept_gathers(all_chunks: Iterable[Chunk], ranks: int, element_bytes: int) -> tuple[int, ...]:
    """The all-gathers, by their number of elements of a rank, whose buffers stay allocated after a step, the last used last."""
    kept: dict[int, int] = {}
    for chunk in all_chunks if ranks > 1 else ():
        shards = sum(chunk.shards)
        n_bytes = kept.pop(shards, 0) or gather_buffers(shards, ranks, element_bytes).exact
        if n_bytes <= MOST_KEPT_BYTES:
            while sum(kept.values()) + n_bytes > MOST_KEPT_BYTES:
                del kept[next(iter(kept))]
            kept[shards] = n_bytes
    return tuple(kept)


class MuonUpdates:
    """The updates of one step on rank 0."""

    def __init__(self, all_chunks: tuple[Chunk, ...], ranks: int, element_bytes: int) -> None:
        self._chunks, self._ranks, self._element_bytes = all_chunks, ranks, element_bytes
        self._kept: dict[int, BufferId] = {}  # the last used last
        self._named: dict[str, BufferId] = {}  # by the variable that refers to them

    def begin_step(self, step: StepBuilder) -> None:
        """Allocate the buffers that stay from step to step."""
        for shards in kept_gathers(self._chunks, self._ranks, self._element_bytes):
            storages = gather_buffers(shards, self._ranks, self._element_bytes)
            self._kept[shards] = step.alloc_in_first_step(Account.COMMUNICATION, storages)

    def update(self, step: StepBuilder) -> None:
        """Update all chunks. A variable refers to the whole gradients of a chunk until the next has its updates."""
        earlier = NO_BUFFER
        for chunk in self._chunks:
            gradients = self._gather(step, sum(chunk.shards))
            self._update_chunk(step, chunk)
            step.free(earlier)
            earlier = gradients
        step.free(earlier)

    def _update_chunk(self, step: StepBuilder, chunk: Chunk) -> None:
        clones = (Storages.of(self._element_bytes * n) for n in chunk.shards)
        momentum = step.alloc(Account.TEMPORARIES, sum(clones, NO_STORAGES))
        whole = self._gather(step, sum(chunk.shards))
        for each in chunk.rounds:
            own = each.matrices[0]
            step.transient(Account.TEMPORARIES, update_temporaries(own.shape, self._element_bytes))
            self._name(step, "update", Storages.of(self._element_bytes * own.elements))
            self._exchange(step, each)
        step.free(*self._named.values(), momentum, whole)
        self._named = {}

    def _exchange(self, step: StepBuilder, each: Round) -> None:
        """Gather the updates of a round, and the momentum. NCCL's all-gather into a list of tensors has a flat buffer.

        Unless the round is uniform, the list is of padded copies. A variable refers to one of them until the next such round ends.
        """
        whole, copies = Storages.of(self._element_bytes * each.largest), 0 if each.is_uniform else self._ranks
        last = {}
        for name in _EXCHANGED:
            self._name(step, f"padded {name}", whole if copies else NO_STORAGES)
        for name in _EXCHANGED:
            last[name] = step.alloc(Account.TEMPORARIES, whole if copies else NO_STORAGES)
            self._name(step, f"other copies of {name}", whole * max(0, copies - 1))
        for name in _EXCHANGED:
            self._name(step, f"flat {name}", Storages.of(self._ranks * whole.exact))
        for name in _EXCHANGED if copies else ():
            step.free(self._named.get(f"last copy of {name}", NO_BUFFER))
            self._named[f"last copy of {name}"] = last[name]

    def _name(self, step: StepBuilder, name: str, storages: Storages) -> None:
        """Let a variable refer to new storages, and free those that it referred to."""
        new = step.alloc(Account.TEMPORARIES, storages)
        step.free(self._named.get(name, NO_BUFFER))
        self._named[name] = new

    def _gather(self, step: StepBuilder, shards: int) -> BufferId:
        """Gather shards and return the whole matrices, which one rank has without a copy."""
        if self._ranks == 1:
            return NO_BUFFER
        used, storages = self._kept.pop(shards, NO_BUFFER), gather_buffers(shards, self._ranks, self._element_bytes)
        if used == NO_BUFFER:
            used = step.alloc(Account.COMMUNICATION, storages)
        kept = storages.exact <= MOST_KEPT_BYTES
        if kept:
            while storages.exact + self._kept_bytes() > MOST_KEPT_BYTES:
                step.free(self._kept.pop(next(iter(self._kept))))
            self._kept[shards] = used
        whole = step.alloc(Account.TEMPORARIES, Storages.of(self._element_bytes * self._ranks * shards))
        if not kept:
            step.free(used)
        return whole

    def _kept_bytes(self) -> int:
        return sum(gather_buffers(n, self._ranks, self._element_bytes).exact for n in self._kept)


class Exchanged(NamedTuple):
    """What the updates of a step take: bytes and number of all-gathers, FLOPs of the slowest rank, bytes of the copies between buffers."""

    gathered_bytes: int
    gathers: int
    flops: int
    copied_bytes: int


def exchanged(all_chunks: Iterable[Chunk], ranks: int, element_bytes: int) -> Exchanged:
    """The work of the updates. Nothing runs at the same time as an all-gather."""
    sent = gathers = flops = copied = 0
    for chunk in all_chunks:
        whole = element_bytes * ranks * sum(chunk.shards)
        in_rounds = sum(element_bytes * ranks * each.largest for each in chunk.rounds)
        sent += 2 * (whole + in_rounds)
        gathers += 2 + 2 * len(chunk.rounds)
        flops += sum(max(update_flops(p.shape) for p in each.matrices) for each in chunk.rounds)
        copied += 2 * 2 * (whole + in_rounds)  # gradients and momentum are read and written
    if ranks == 1:
        return Exchanged(0, 0, flops, 0)
    return Exchanged(sent, gathers, flops, copied)
