"""Buffers of a DeepSpeed step (ZeRO-1, 2 and 3) on rank 0: buckets, copies, and the optimizer's temporaries. The states are in
`partitions`.

Read in DeepSpeed 0.19.8, under ``deepspeed/runtime/``. c = bytes per element of the compute dtype; m = bytes per element of the
masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.groups import Group, groups
from fsdp_advisor.engines.deepspeed.muon_offload import Updates
from fsdp_advisor.engines.deepspeed.muon_updates import Chunk
from fsdp_advisor.engines.deepspeed.partitions import (
    FP64_NORM_BYTES,
    largest_parameter,
    muon_chunks,
    offloaded_updates,
    owned_by_rank0,
    owned_elements,
    persistent,
    shard_elements,
    shard_total,
    sub_groups,
)
from fsdp_advisor.engines.deepspeed.settings import DEFAULTS, Settings, master_bytes, offloads_optimizer, stage
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.deepspeed_muon import update_flops, update_temporaries
from fsdp_advisor.program.storages import NO_STORAGES, Storages

NORM_ELEMENTS = 250_000_000
"""The most elements that stage 3 with offload copies at a time. Source: zero/stage3.py, _constant_buffered_norm2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant of the optimizer step: the storages on the GPU in addition to the states.

    `gradients`: those of the backward pass. `stepped`: those that the optimizer reads, which are allocated before its state and
    its temporaries.
    """

    name: str
    gradients: Storages = NO_STORAGES
    stepped: Storages = NO_STORAGES
    temporaries: Storages = NO_STORAGES

    @property
    def total(self) -> Storages:
        return self.gradients + self.stepped + self.temporaries


class MuonUpdate(NamedTuple):
    """Muon's update of a matrix, which replaces its gradient, the temporaries at their peak, before the update is complete, and FLOPs."""

    update: Storages
    temporaries: Storages
    flops: int


@dataclass(slots=True)
class PendingGradients:
    """Sizes of the gradients that wait for one reduction. `start`: the last one's position in the flat buffer of its group, of which each
    rank owns `owned` elements.

    `first_rank` and `last_rank`: the ranks that own parts of the gradients, in stages 1 and 2. `largest_own` is the largest piece of one
    gradient that rank 0 keeps. `padded` counts elements, with each gradient padded to a multiple of the number of ranks; `uneven` those
    that rank 0 keeps of gradients that need the padding.
    """

    elements: int = 0
    count: int = 0
    padded: int = 0
    uneven: int = 0
    start: int = 0
    owned: int = 0
    first_rank: int = 0
    last_rank: int = 0
    largest_own: int = 0

    def put(self, start: int, elements: int, padded: int, own: int, owned: int = 0) -> None:
        if owned:
            first, last = start // owned, (start + elements - 1) // owned
            self.first_rank = min(first, self.first_rank) if self.count else first
            self.last_rank = max(last, self.last_rank)
            self.start, self.owned = start, owned
        if own > self.largest_own:
            self.largest_own = own
        self.elements += elements
        self.padded += padded
        self.uneven += own if padded != elements else 0
        self.count += 1

    def clear(self) -> None:
        self.elements = self.count = self.padded = self.uneven = self.largest_own = 0
        self.start = self.owned = self.first_rank = self.last_rank = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The buffers of a step on rank 0 in addition to the states, and their lifetimes.

    `bucket`: the buffer into which gradients are copied to be reduced. It lives from the first gradient of a backward pass
    to the pass's end (stage 1: from the first micro-batch to the end of the last). Empty for stage 3, whose bucket is among
    the states.
    `bucket_elements`: the bucket's size. A gradient that does not fit causes a reduction first. A gradient larger than the
    bucket is reduced in place.
    `gradient_bytes`: bytes per element of gradients, of the bucket and of everything reduced.
    `partition_elements`: stages 1, 2: for each group, the number of elements of its flat buffer that each rank owns. Rank r's begin at r
    times this number.
    `averaged`: stages 1, 2: rank 0's own gradients. They live from the first reduction that contains one of them to the
    optimizer step.
    `updates`: Muon's. The last backward makes them; they live until the optimizer steps Muon's group.
    `whole_gradients`: whether gradients stay whole, as autograd allocated them, until the last micro-batch's backward ends.
    `released_at_step`: the states that are freed while the optimizer steps.
    `chunks`: stage 3 without offload: the matrices that Muon updates before the optimizer's step. `offloaded_updates`: Muon's with
    offload. Under stage 3 the bucket `all_reduces` for Muon, which refuses ``reduce_scatter``.
    `moments`: the instants of the optimizer step. `offload_cast_bytes`: bytes per element of the copy of a gradient that
    goes to the host; 0 without offload.
    """

    bucket: Storages
    bucket_elements: int
    gradient_bytes: int
    partition_elements: tuple[int, ...]
    averaged: Storages
    updates: tuple[MuonUpdate, ...]
    whole_gradients: bool
    released_at_step: Storages
    moments: tuple[Moment, ...]
    chunks: tuple[Chunk, ...] = ()
    offloaded_updates: Updates | None = None
    offload_cast_bytes: int = 0
    sharded: bool = False
    all_reduces: bool = False

    def copy_bytes(self, filled: PendingGradients, ranks: int) -> int:
        """Bytes of the flat copy that a reduction makes of the `filled` gradients.

        Stage 3 copies, with padding, unless there is a single gradient that divides evenly. If it all-reduces the bucket, it copies what
        it divides by the number of ranks, and pads its shards of gradients that do not divide evenly. Stages 1, 2 copy if the gradients
        belong to several ranks. They cut a gradient larger than the bucket at the ranks' boundaries and reduce it in parts;
        the slice that fills a part ends it.

        Source: zero/stage_1_and_2.py, average_tensor, allreduce_and_scatter, allreduce_bucket;
        comm/coalesced_collectives.py, reduce_scatter_coalesced; zero/stage3.py, __avg_scatter_contiguous_grads.
        """
        if self.all_reduces and filled.elements <= self.bucket_elements:
            return self.gradient_bytes * (filled.elements + filled.uneven) if ranks > 1 else 0
        if self.sharded:
            whole = filled.count == 1 and filled.elements % ranks == 0
            return 0 if whole else self.gradient_bytes * filled.padded
        if not filled.count or filled.first_rank == filled.last_rank:
            return 0
        if filled.elements <= self.bucket_elements:
            return self.gradient_bytes * filled.elements
        largest = part = slices = 0
        at, owned, last = filled.start, filled.owned, filled.start + filled.elements  # a single gradient
        while at < last:
            end = min((at // owned + 1) * owned, last)
            part, slices, at = part + end - at, slices + 1, end
            if slices > 1:  # a single slice is not copied
                largest = max(largest, part)
            if part > self.bucket_elements:
                part = slices = 0
        return self.gradient_bytes * largest

    def offload_temporaries(self, elements: int) -> Storages:
        """The peak of GPU temporaries while `elements` of one reduced gradient (rank 0's part) move to the host.

        They are the norm's fp64 copy, then a copy in the masters' dtype. Stage 3 first copies back the gradient on the host.
        Source: zero/stage_1_and_2.py, copy_grads_in_partition; zero/stage3.py, partition_grads.
        """
        if not self.offload_cast_bytes:
            return NO_STORAGES
        counted = min(elements, NORM_ELEMENTS) if self.sharded else elements
        cast = 0 if self.offload_cast_bytes == self.gradient_bytes else self.offload_cast_bytes * elements
        scratch = Storages.of(max(FP64_NORM_BYTES * counted, cast))
        return scratch + Storages.of(self.gradient_bytes * elements) if self.sharded else scratch


def _moments(
    plan: Plan,
    gradients: Storages,
    elements: int,
    pieces: int,
    largest: int,
    *,
    overflow: Storages = NO_STORAGES,
    others: Storages = NO_STORAGES,
) -> tuple[Moment, ...]:
    """The instants of the optimizer step.

    norm: an fp64 copy of one gradient at a time. cast: the flattened gradients and their copy in the masters' dtype, alive
    together. update: that copy and the optimizer's temporaries. A single piece is flattened without a copy.

    `gradients`: those on the GPU before the step. `elements`: of the flat partition. `pieces`: the gradients that are flattened into it.
    `largest`: elements of the largest gradient. `overflow`: temporaries of fp16's check. `others`: those among `gradients` that a
    later group steps.

    Source: zero/stage_1_and_2.py, step; zero/stage3.py, step, _prepare_fp32_grad_for_sub_group.
    """
    c, m = plan.compute_bytes, master_bytes(plan)
    flattened = Storages.of(c * elements) if pieces > 1 else NO_STORAGES
    cast = Storages.of(m * elements) if m != c else NO_STORAGES
    stepped = cast if m != c else flattened
    kept = gradients if not stepped.exact else others
    update = optimizer_of(plan).flat_step_temporaries(elements, m)
    return (
        Moment(name="overflow", gradients=gradients, temporaries=overflow),
        Moment(name="norm", gradients=gradients, temporaries=Storages.of(FP64_NORM_BYTES * largest)),
        Moment(name="cast", gradients=gradients, temporaries=flattened + cast),
        Moment(name="update", gradients=kept, stepped=stepped, temporaries=update),
    )


def buffers(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> Buffers:
    """The buffers of a step on rank 0, in addition to `states`."""
    ranks, c = plan.shard_degree, plan.compute_bytes
    offloaded, sharded = offloads_optimizer(plan), stage(plan) == 3
    in_groups = () if sharded else groups(profile, plan)
    owned = tuple(owned_elements(group, ranks) for group in in_groups)
    averaged = NO_STORAGES
    updates: tuple[MuonUpdate, ...] = ()
    moments: tuple[Moment, ...] = (Moment(name="update"),)
    if sharded and not offloaded:
        # fp16 checks all gradients at once for overflow: |g| and the comparison (stage3.py, has_overflow)
        total = shard_total(profile, ranks)
        overflow = Storages.of(c * total) + Storages.of(total) if plan.precision == "fp16-mixed" else NO_STORAGES
        largest = shard_elements(largest_parameter(profile), ranks)
        by_group = [
            _moments(plan, NO_STORAGES, each.elements, len(each.parameters), largest, overflow=overflow)
            for each in sub_groups(profile, plan, settings)
        ]
        moments = _one_after_the_other(by_group)
    elif not offloaded:
        kept = sum(owned_by_rank0(group.parameters, n)[0] for group, n in zip(in_groups, owned, strict=True))
        averaged = Storages.of(c * kept)
        updates = tuple(update for group in in_groups if group.by_muon for update in _updates(group, ranks, c))
        moments = _one_after_the_other(_moments_by_group(plan, in_groups, averaged, updates))
    return Buffers(
        bucket=NO_STORAGES if sharded else Storages.of(c * settings.reduce_bucket_size),
        bucket_elements=settings.reduce_bucket_size,
        gradient_bytes=c,
        partition_elements=owned,
        averaged=averaged,
        updates=updates,
        whole_gradients=stage(plan) == 1,
        released_at_step=persistent(profile, plan, settings) if sharded else NO_STORAGES,
        moments=moments,
        offload_cast_bytes=master_bytes(plan) if offloaded else 0,
        chunks=muon_chunks(profile, plan, settings) if sharded else (),
        offloaded_updates=offloaded_updates(profile, plan, settings),
        sharded=sharded,
        all_reduces=sharded and optimizer_of(plan).is_deepspeeds,
    )


def _one_after_the_other(by_group: list[tuple[Moment, ...]]) -> tuple[Moment, ...]:
    """The moments of several groups. Overflow and norms, which are the first group's, come before all updates."""
    return by_group[0][:2] + tuple(moment for each in by_group for moment in each[2:])


def _moments_by_group(
    plan: Plan, in_groups: tuple[Group, ...], averaged: Storages, updates: tuple[MuonUpdate, ...]
) -> list[tuple[Moment, ...]]:
    """The moments of each group in stages 1 and 2. The groups share one buffer of gradients; Muon's has its updates instead of them."""
    ranks = plan.shard_degree
    orthogonalized = sum((each.update for each in updates), NO_STORAGES)
    by_group = []
    for group in in_groups:
        owned = owned_elements(group, ranks)
        _, largest, pieces = owned_by_rank0(group.parameters, owned)
        gradients, others = averaged, NO_STORAGES
        if group.by_muon:
            others = averaged if len(in_groups) > 1 else NO_STORAGES
            gradients = orthogonalized + others
            largest = max(owned_by_rank0(other.parameters, owned_elements(other, ranks))[1] for other in in_groups)
        by_group.append(_moments(plan, gradients, owned, pieces, largest, others=others))
    return by_group


def _updates(group: Group, ranks: int, gradient_bytes: int) -> Iterator[MuonUpdate]:
    """Muon's update of each matrix that rank 0 owns a part of."""
    left = owned_elements(group, ranks)
    for parameter in group.parameters:
        if left <= 0:
            return
        left -= parameter.elements
        yield MuonUpdate(
            update=Storages.of(gradient_bytes * parameter.elements),
            temporaries=update_temporaries(parameter.shape, gradient_bytes),
            flops=update_flops(parameter.shape),
        )
