"""Muon's updates with the optimizer on the host, when the optimizer step begins.

The ranks gather gradients and momentum of several matrices on the GPU, and every rank updates all of them. Then it copies its own parts
back to the host.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, _apply_muon_updates_cpu_offload, _muon_all_gather_partitions,
_muon_param_batches, _partitioned_buffers_all_gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.muon_buffers import Gather, GatherCache, Variables, kept_gathers
from fsdp_advisor.engines.deepspeed.muon_updates import Exchanged
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.deepspeed_muon import update_bytes, update_flops, update_temporaries
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.storages import NO_STORAGES, Storages

MOST_GATHERED_BYTES = 64 * 1024**2
"""The most bytes of gradients and momentum that stages 1 and 2 gather at a time, and of the buffers of a gather
(`_muon_allgather_max_buffer_bytes`).
"""
NORM_BYTES = 8
"""The norm of an update is computed in fp64. Source: zero/utils.py, get_norm_dtype."""


class Matrix(NamedTuple):
    """A matrix, and the elements of it that rank 0 owns; under stage 3 with padding."""

    parameter: Parameter
    own: int

    @property
    def elements(self) -> int:
        return self.parameter.elements


class Batch(NamedTuple):
    """Matrices that are whole on the GPU at the same time.

    `part`: the elements of the rank that owns most of them. Each rank sends as many. `gathers`: of the first step, and of later ones.
    """

    matrices: tuple[Matrix, ...]
    part: int
    gathers: tuple[Gather, Gather]


class Updates(NamedTuple):
    """The updates of a plan's optimizer step, in batches, and what they have in common.

    `gathered_bytes`: per element of what is gathered. `host_bytes`: per element of the gradients on the host. `loss_scaled`: whether
    the updates are multiplied by a loss scale. `sharded`: stage 3, which copies its part of the gradients to the GPU first, and what it
    gathers into the order of the matrices.
    """

    batches: tuple[Batch, ...]
    ranks: int
    gathered_bytes: int
    host_bytes: int
    loss_scaled: bool
    sharded: bool

    @property
    def kept(self) -> tuple[Gather, ...]:
        """The all-gathers whose buffers stay from step to step. Gradients alone are gathered in the first step."""
        first, later = ([batch.gathers[n] for batch in self.batches] for n in range(2))
        return kept_gathers([*first, *later, *later], self.ranks, self.gathered_bytes)

    @property
    def exchanged(self) -> Exchanged:
        """The work of the updates of one step on the GPU. Nothing runs at the same time as an all-gather."""
        matrices = [matrix.parameter for batch in self.batches for matrix in batch.matrices]
        n_bytes = sum(update_bytes(p, self.gathered_bytes) for p in matrices)
        flops = sum(update_flops(p.shape) for p in matrices)
        if self.ranks == 1:
            return Exchanged(0, 0, flops, n_bytes)
        sent = 2 * self.gathered_bytes * self.ranks * sum(batch.part for batch in self.batches)
        gathers = sum(-(-batch.part // batch.gathers[1].elements) for batch in self.batches)
        return Exchanged(sent, gathers, flops, n_bytes + 2 * sent)

    @property
    def host_transfer_bytes(self) -> int:
        """Bytes that rank 0 copies between host and GPU in a step: its gradients and momentum, in both directions."""
        own = sum(matrix.own for batch in self.batches for matrix in batch.matrices)
        return 2 * (self.host_bytes + self.gathered_bytes) * own


def flat_batches(matrices: Iterable[Parameter], owned: int, ranks: int, element_bytes: int) -> Iterator[Batch]:
    """The batches of stages 1 and 2. `matrices`: in the order of their flat buffer, of which each rank owns `owned` elements."""
    batch: list[Matrix] = []
    start = end = 0
    for parameter in matrices:
        if batch and end + parameter.elements - start > MOST_GATHERED_BYTES // (2 * element_bytes):
            yield _flat_batch(batch, start, end, owned, ranks, element_bytes)
            batch, start = [], end
        batch.append(Matrix(parameter, max(0, min(parameter.elements, owned - end))))
        end += parameter.elements
    if batch:
        yield _flat_batch(batch, start, end, owned, ranks, element_bytes)


def _flat_batch(matrices: list[Matrix], start: int, end: int, owned: int, ranks: int, element_bytes: int) -> Batch:
    """The matrices between two positions of the flat buffer. An all-gather that needs larger buffers is divided."""
    owners = range(start // owned, (end - 1) // owned + 1)
    part = max(min(end, (rank + 1) * owned) - max(start, rank * owned) for rank in owners)
    first, later = (
        Gather(min(part, max(1, MOST_GATHERED_BYTES // ((ranks + 1) * tensors * element_bytes))), tensors)
        for tensors in (1, 2)
    )
    return Batch(tuple(matrices), part, (first, later))


def sub_group_batches(sub_groups: Iterable[Iterable[Parameter]], ranks: int) -> Iterator[Batch]:
    """The batches of stage 3: whole sub-groups. The momentum exists from the beginning."""
    for parameters in sub_groups:
        matrices = tuple(Matrix(p, -(-p.elements // ranks)) for p in parameters)
        part = sum(matrix.own for matrix in matrices)
        gather = Gather(part, tensors=2)
        yield Batch(matrices, part, (gather, gather))


class OffloadedUpdates:
    """The updates of one step on rank 0."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._cache = GatherCache(updates.ranks, updates.gathered_bytes, frees_first=not updates.sharded)
        self._variables = Variables()

    def begin_step(self, step: StepBuilder) -> None:
        """Allocate the buffers that stay from step to step."""
        self._cache.begin_step(step, self._updates.kept)

    def update(self, step: StepBuilder) -> None:
        for batch in self._updates.batches:
            if self._updates.sharded:
                self._update_sub_group(step, batch)
            else:
                self._update_flat(step, batch)
        self._variables.clear(step)

    def _update_flat(self, step: StepBuilder, batch: Batch) -> None:
        c = self._updates.gathered_bytes
        whole = (Storages.of(c * matrix.elements, 2) for matrix in batch.matrices)
        self._variables.assign(step, "whole", sum(whole, NO_STORAGES))
        if self._updates.ranks > 1:
            self._cache.use(step, batch.gathers[1])
        for matrix in batch.matrices:
            self._orthogonalize(step, matrix)
            scaled = Storages.of(c * matrix.own if self._updates.loss_scaled else 0)
            step.transient(Account.TEMPORARIES, scaled + Storages.of(NORM_BYTES * matrix.own))
        self._variables.clear(step)

    def _update_sub_group(self, step: StepBuilder, batch: Batch) -> None:
        """The whole matrices of the last sub-group stay until these are gathered."""
        c, host = self._updates.gathered_bytes, self._updates.host_bytes
        parts = (Storages.of(host * matrix.own) + Storages.of(c * matrix.own) for matrix in batch.matrices)
        self._variables.assign(step, "parts", sum(parts, NO_STORAGES))
        self._gather_sub_group(step, batch)
        for matrix in batch.matrices:
            self._orthogonalize(step, matrix)
            part = Storages.of(c * matrix.own)
            self._variables.assign(step, "own update", part)
            if self._updates.loss_scaled:
                self._variables.assign(step, "scaled update", part)
            step.transient(Account.TEMPORARIES, Storages.of(host * matrix.own if host != c else 0))
            self._variables.assign(step, "own momentum", part)
            step.transient(Account.TEMPORARIES, Storages.of(NORM_BYTES * matrix.own))

    def _gather_sub_group(self, step: StepBuilder, batch: Batch) -> None:
        """Gather the matrices in a dtype of 16 bits. One rank casts the gradients and has the momentum already."""
        c, ranks, gather = self._updates.gathered_bytes, self._updates.ranks, batch.gathers[1]
        if ranks == 1:
            cast = (Storages.of(c * m.elements if self._updates.host_bytes != c else 0) for m in batch.matrices)
            self._variables.assign(step, "whole", sum(cast, NO_STORAGES))
            return
        passing = self._cache.use(step, gather)
        self._variables.assign(step, "whole", Storages.of(c * ranks * gather.elements * gather.tensors))
        step.free(passing)

    def _orthogonalize(self, step: StepBuilder, matrix: Matrix) -> None:
        c = self._updates.gathered_bytes
        step.transient(Account.TEMPORARIES, update_temporaries(matrix.parameter.shape, c))
        self._variables.assign(step, "update", Storages.of(c * matrix.elements))
