"""Muon's updates under ZeRO-3, which replace the gradients in the ranks' shards when the optimizer step begins.

The gradients of a chunk of matrices are gathered, and their momentum. In rounds each rank updates one matrix, and the ranks exchange the
updates and the momentum. Then every rank copies its own shards back.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, _apply_muon_to_accumulated_grads, _muon_update_sub_group,
_partitioned_buffers_all_gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.muon_buffers import Gather, GatherCache, Variables, kept_gathers
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.deepspeed_muon import update_flops, update_temporaries
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.instructions import NO_BUFFER, BufferId
from fsdp_advisor.program.storages import NO_STORAGES, Storages

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

    @property
    def gather(self) -> Gather:
        """The all-gather of the gradients; that of the momentum is equal."""
        return Gather(sum(self.shards))


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


class MuonUpdates:
    """The updates of one step on rank 0."""

    def __init__(self, all_chunks: tuple[Chunk, ...], ranks: int, element_bytes: int) -> None:
        self._chunks, self._ranks, self._element_bytes = all_chunks, ranks, element_bytes
        self._cache, self._variables = GatherCache(ranks, element_bytes), Variables()

    def begin_step(self, step: StepBuilder) -> None:
        """Allocate the buffers that stay from step to step."""
        gathers = (chunk.gather for chunk in self._chunks)
        self._cache.begin_step(step, kept_gathers(gathers, self._ranks, self._element_bytes))

    def update(self, step: StepBuilder) -> None:
        """Update all chunks. A variable refers to the whole gradients of a chunk until the next has its updates."""
        earlier = NO_BUFFER
        for chunk in self._chunks:
            gradients = self._gather(step, chunk)
            self._update_chunk(step, chunk)
            step.free(earlier)
            earlier = gradients
        step.free(earlier)

    def _update_chunk(self, step: StepBuilder, chunk: Chunk) -> None:
        clones = (Storages.of(self._element_bytes * n) for n in chunk.shards)
        momentum = step.alloc(Account.TEMPORARIES, sum(clones, NO_STORAGES))
        whole = self._gather(step, chunk)
        for each in chunk.rounds:
            own = each.matrices[0]
            step.transient(Account.TEMPORARIES, update_temporaries(own.shape, self._element_bytes))
            self._variables.assign(step, "update", Storages.of(self._element_bytes * own.elements))
            self._exchange(step, each)
        self._variables.clear(step)
        step.free(momentum, whole)

    def _exchange(self, step: StepBuilder, each: Round) -> None:
        """Gather the updates of a round, and the momentum. NCCL's all-gather into a list of tensors has a flat buffer.

        Unless the round is uniform, the list is of padded copies. A variable refers to one of them until the next such round ends.
        """
        whole, copies = Storages.of(self._element_bytes * each.largest), 0 if each.is_uniform else self._ranks
        variables, last = self._variables, {}
        for name in _EXCHANGED:
            variables.assign(step, f"padded {name}", whole if copies else NO_STORAGES)
        for name in _EXCHANGED:
            last[name] = step.alloc(Account.TEMPORARIES, whole if copies else NO_STORAGES)
            variables.assign(step, f"other copies of {name}", whole * max(0, copies - 1))
        for name in _EXCHANGED:
            variables.assign(step, f"flat {name}", Storages.of(self._ranks * whole.exact))
        for name in _EXCHANGED if copies else ():
            variables.move(step, f"last copy of {name}", last[name])

    def _gather(self, step: StepBuilder, chunk: Chunk) -> BufferId:
        """Gather shards and return the whole matrices, which one rank has without a copy."""
        if self._ranks == 1:
            return NO_BUFFER
        passing = self._cache.use(step, chunk.gather)
        whole = Storages.of(self._element_bytes * self._ranks * chunk.gather.elements)
        gathered = step.alloc(Account.TEMPORARIES, whole)
        step.free(passing)
        return gathered


class Exchanged(NamedTuple):
    """The cost of a step's updates: bytes and number of all-gathers, FLOPs of the slowest rank, bytes of the copies between buffers."""

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
