"""Micro-batches and accumulations whose product with the world size is the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.batch import batch_refusal
from fsdp_advisor.job.choices import MAX_BATCH
from fsdp_advisor.job.generation import check_groups, check_ranks, least_micro_batch
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.tape_keys import gpu_sizes_are_not_polynomials, tape_key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The micro-batches that a job allows, ascending, and the accumulation of each.

    `per_rank` is the number of sequences per rank and optimizer step. If it is None, the global batch is free, and `steps` is
    the accumulation of every micro-batch. `only_recorded`: others are left out, because PyTorch, which would record them, is missing.
    """

    sizes: Sequence[int]
    per_rank: int | None = None
    steps: int = 1
    only_recorded: bool = False

    def accumulation(self, micro_batch_size: int) -> int:
        return self.steps if self.per_rank is None else self.per_rank // micro_batch_size

    @property
    def preferred(self) -> int:
        """The micro-batch to try first: the largest if the global batch is given, else the smallest."""
        return self.sizes[0] if self.per_rank is None else self.sizes[-1]

    @property
    def smallest(self) -> int:
        return self.sizes[0]


def batches(request: RecommendRequest, *, world: int) -> Batches:
    """The batches that the request allows on `world` ranks. Raises UsageError if the global batch is not divisible by them, if no batch
    has whole groups of completions, or if the job cannot run on them.
    """
    check_ranks(request, world)
    found = _dividing(request, world)
    if isinstance(found.sizes, range):  # all sizes, of which it would take long to try each
        least = least_micro_batch(request, gpus=world, accumulation=found.steps)
        return replace(found, sizes=range(least, MAX_BATCH + 1, least))
    steps = {size: found.accumulation(size) for size in found.sizes}
    whole = tuple(b for b, a in steps.items() if b % least_micro_batch(request, gpus=world, accumulation=a) == 0)
    if not whole:
        size = found.smallest
        check_groups(request, gpus=world, micro_batch_size=size, accumulation=steps[size])
    return replace(found, sizes=whole)


def batches_if_possible(request: RecommendRequest, *, world: int) -> Batches | None:
    """`batches`, or None if it raises UsageError."""
    try:
        return batches(request, world=world)
    except UsageError:
        return None


def _dividing(request: RecommendRequest, world: int) -> Batches:
    """The batches whose product with `world` is the global batch; every batch if it is open."""
    size = None if request.find == "batch" else request.micro_batch_size
    steps, whole = request.gradient_accumulation_steps, request.global_batch_size
    if whole is None:
        return Batches(sizes=range(1, MAX_BATCH + 1) if size is None else (size,), steps=steps or 1)
    made = (size or 1) * (steps or 1) * world
    if whole % made or (size and steps and whole != made):
        raise batch_refusal(whole, size, steps, world)
    per_rank = whole // world
    if steps is not None:
        return Batches(sizes=(per_rank // steps,), per_rank=per_rank)
    return Batches(sizes=(size,) if size else divisors(per_rank), per_rank=per_rank)


def recorded_only(allowed: Batches, model: Resolved, base: Plan) -> Batches:
    """The smallest micro-batch that is recorded, if each needs a recording of its own and PyTorch, which records it, is missing; else all.

    Also all if none is recorded: the error about their steps says what is missing.
    """
    profile = model.profile
    if profile is None or model.can_record or not gpu_sizes_are_not_polynomials(profile, tape_key_of(base, profile)):
        return allowed
    shapes = {at for name in model.recorded_names if (at := TapeKey.from_name(name).at) is not None}
    possible = sorted({size * length // base.seq_len for size, length in shapes})
    sizes = [
        size for size in possible if size in allowed.sizes and replace(base, micro_batch_size=size).tape_shape in shapes
    ]
    return replace(allowed, sizes=sizes[:1], only_recorded=len(allowed.sizes) > 1) if sizes else allowed


def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(low + [n // d for d in reversed(low) if d * d != n])
