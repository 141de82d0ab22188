"""Buffers of a DeepSpeed step (ZeRO-1, 2 and 3) on rank 0: buckets, copies, and the optimizer's temporaries. The states are in
`partitions`.

Read in DeepSpeed 0.19.8, under ``deepspeed/runtime/``. c = bytes per element of the compute dtype; m = bytes per element of the
masters.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.engines.deepspeed.partitions import (
    FP64_NORM_BYTES,
    flat_elements,
    largest_parameter,
    persistent,
    shard_elements,
    shard_total,
    sub_groups,
)
from fsdp_advisor.engines.deepspeed.settings import DEFAULTS, Settings, master_bytes, offloads_optimizer, stage
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.program.storages import NO_STORAGES, Storages

NORM_ELEMENTS = 250_000_000
"""The most elements that stage 3 with offload copies at a time. Source: zero/stage3.py, _constant_buffered_norm2."""


def owned_by_rank0(profile: Profile, partition_elements: int) -> tuple[int, int, int]:
    """(elements kept, largest owned piece, number of pieces) of the gradients that rank 0 owns a part of, in stages 1 and 2.

    The partition is the first 1/N of the model. The gradient that crosses its end is kept whole.
    Source: zero/stage_1_and_2.py, get_partition_info, copy_grads_in_partition.
    """
    start = largest = pieces = 0
    for parameter in profile.in_order():
        if start >= partition_elements:
            break
        if parameter.trainable:
            largest = max(largest, min(parameter.elements, partition_elements - start))
            start, pieces = start + parameter.elements, pieces + 1
    return start, largest, pieces + (start < partition_elements)


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


@dataclass(slots=True)
class PendingGradients:
    """Sizes of the gradients that wait for one reduction. `first` and `end` are positions in the flat buffer.

    `largest_own` is the largest piece of one gradient that rank 0 keeps. `padded` counts elements, with each gradient padded
    to a multiple of the number of ranks.
    """

    elements: int = 0
    count: int = 0
    padded: int = 0
    first: int = 0
    end: int = 0
    largest_own: int = 0

    def put(self, start: int, elements: int, padded: int, own: int) -> None:
        if not self.count or start < self.first:
            self.first = start
        if start + elements > self.end:
            self.end = start + elements
        if own > self.largest_own:
            self.largest_own = own
        self.elements += elements
        self.padded += padded
        self.count += 1

    def clear(self) -> None:
        self.elements = self.count = self.padded = self.first = self.end = self.largest_own = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The buffers of a step on rank 0 in addition to the states, and their lifetimes.

    `bucket`: the buffer into which gradients are copied to be reduced. It lives from the first gradient of a backward pass
    to the pass's end (stage 1: from the first micro-batch to the end of the last). Empty for stage 3, whose bucket is among
    the states.
    `bucket_elements`: the bucket's size. A gradient that does not fit causes a reduction first. A gradient larger than the
    bucket is reduced in place.
    `gradient_bytes`: bytes per element of gradients, of the bucket and of everything reduced.
    `partition_elements`: stages 1, 2: the number of elements of the flat buffer that each rank owns. Rank r's begin at r times
    this number.
    `averaged`: stages 1, 2: rank 0's own gradients. They live from the first reduction that contains one of them to the
    optimizer step.
    `whole_gradients`: whether gradients stay whole, as autograd allocated them, until the last micro-batch's backward ends.
    `released_at_step`: the states that are freed while the optimizer steps.
    `moments`: the instants of the optimizer step. `offload_cast_bytes`: bytes per element of the copy of a gradient that
    goes to the host; 0 without offload.
    """

    bucket: Storages
    bucket_elements: int
    gradient_bytes: int
    partition_elements: int
    averaged: Storages
    whole_gradients: bool
    released_at_step: Storages
    moments: tuple[Moment, ...]
    offload_cast_bytes: int = 0
    sharded: bool = False

    def copy_bytes(self, filled: PendingGradients, ranks: int) -> int:
        """Bytes of the flat copy that a reduction makes of the `filled` gradients.

        Stage 3 copies, with padding, unless there is a single gradient that divides evenly. Stages 1, 2 copy if the gradients
        belong to several ranks. They cut a gradient larger than the bucket at the ranks' boundaries and reduce it in parts;
        the slice that fills a part ends it.

        Source: zero/stage_1_and_2.py, average_tensor, allreduce_and_scatter, allreduce_bucket;
        comm/coalesced_collectives.py, reduce_scatter_coalesced.
        """
        if self.sharded:
            whole = filled.count == 1 and filled.elements % ranks == 0
            return 0 if whole else self.gradient_bytes * filled.padded
        owned = self.partition_elements
        if not filled.count or filled.first // owned == (filled.end - 1) // owned:
            return 0
        if filled.elements <= self.bucket_elements:
            return self.gradient_bytes * filled.elements
        largest = part = slices = 0
        at = filled.first
        while at < filled.end:
            end = min((at // owned + 1) * owned, filled.end)
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
    plan: Plan, gradients: Storages, elements: int, pieces: int, largest: int, overflow: Storages = NO_STORAGES
) -> tuple[Moment, ...]:
    """The instants of the optimizer step.

    norm: an fp64 copy of one gradient at a time. cast: the flattened gradients and their copy in the masters' dtype, alive
    together. update: that copy and the optimizer's temporaries. A single piece is flattened without a copy.

    `gradients`: those on the GPU before the step. `elements`: of the flat partition. `pieces`: the gradients that are flattened into it.
    `largest`: elements of the largest gradient. `overflow`: temporaries of fp16's check.

    Source: zero/stage_1_and_2.py, step; zero/stage3.py, step, _prepare_fp32_grad_for_sub_group.
    """
    c, m = plan.compute_bytes, master_bytes(plan)
    flattened = Storages.of(c * elements) if pieces > 1 else NO_STORAGES
    cast = Storages.of(m * elements) if m != c else NO_STORAGES
    stepped = cast if m != c else flattened
    kept = gradients if not stepped.exact else NO_STORAGES
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
    averaged, owned = NO_STORAGES, 0
    moments: tuple[Moment, ...] = (Moment(name="update"),)
    if sharded:
        if not offloaded:
            # fp16 checks all gradients at once for overflow: |g| and the comparison (stage3.py, has_overflow)
            total = shard_total(profile, ranks)
            overflow = Storages.of(c * total) + Storages.of(total) if plan.precision == "fp16-mixed" else NO_STORAGES
            largest = shard_elements(largest_parameter(profile), ranks)
            groups = sub_groups(profile, ranks, settings)
            by_group = [_moments(plan, NO_STORAGES, n, pieces, largest, overflow) for n, pieces in groups]
            moments = by_group[0][:2] + tuple(moment for each in by_group for moment in each[2:])
    else:
        owned = flat_elements(profile.trainable_parameters, ranks) // ranks
        kept, largest, pieces = owned_by_rank0(profile, owned)
        if not offloaded:
            averaged = Storages.of(c * kept)
            moments = _moments(plan, averaged, owned, pieces, largest)
    return Buffers(
        bucket=NO_STORAGES if sharded else Storages.of(c * settings.reduce_bucket_size),
        bucket_elements=settings.reduce_bucket_size,
        gradient_bytes=c,
        partition_elements=owned,
        averaged=averaged,
        whole_gradients=stage(plan) == 1,
        released_at_step=persistent(profile, plan, settings) if sharded else NO_STORAGES,
        moments=moments,
        offload_cast_bytes=master_bytes(plan) if offloaded else 0,
        sharded=sharded,
    )
