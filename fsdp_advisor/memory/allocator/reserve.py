"""What a job reserves: its steps walked through the caching allocator until the allocator's state repeats.

It begins with what loading has left in the cache: whole units or tensors from which shards were made are freed, but their
segments stay with PyTorch. (The pictures in huggingface/accelerate, benchmarks/fsdp2/imgs, show it of a model's embedding.)

Assumed: the host reads the loss after each step, gradients are set to None. The host runs ahead of the GPU as far as it is let
(FSDP1's limit on all-gathers, the queue of kernel launches), which holds back what `record_stream` marks; collectives keep pace
with computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from fsdp_advisor.engines import schedule_for
from fsdp_advisor.engines.ddp.schedule import rebuilt_buckets
from fsdp_advisor.engines.fsdp1.schedule import tried
from fsdp_advisor.engines.transfer import Loading
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator.caching import CachingAllocator, OutOfMemory, Segment
from fsdp_advisor.memory.allocator.conf import AllocatorConf
from fsdp_advisor.memory.allocator.trace import Steps, Trace
from fsdp_advisor.memory.ledger import ALL_GATHER, COMPUTE
from fsdp_advisor.memory.libraries import WORKSPACES
from fsdp_advisor.memory.replay import replay
from fsdp_advisor.memory.score import sized
from fsdp_advisor.memory.step import composed
from fsdp_advisor.memory.storages import NO_STORAGES, round_up
from fsdp_advisor.model.profile import Profile, Tape

MOST_STEPS = 16
"""A state that has not come back by then is not waited for."""
RETRYING_STEPS = 4
"""A job whose steps have retried this often in a row is taken to go on so."""

Verdict = Literal["fits", "fits_with_retries", "does_not_fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Where the memory runs out: the driver gives no more, whatever is released."""

    phase: str
    where: str
    asked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a step comes to. The peaks are those with room to spare; `segments` stand at the end of a steady step.

    `allocated_peak_bytes` is `max_memory_allocated`, `reserved_peak_bytes` `max_memory_reserved`; `requested_peak_bytes`
    (`requested_bytes.all.peak`) has each storage rounded up to 512 and no more, for as long as another stream holds it back. `steps_until_steady` is None if the state never repeated.
    Under a limit: `retries` is how often the driver refused and cached memory had to be released, `retries_per_step` in the
    last step walked; `expandable_segments_help` if they end that, or make the job fit.
    """

    allocated_peak_bytes: int
    requested_peak_bytes: int
    reserved_peak_bytes: int
    steps_until_steady: int | None
    segments: tuple[Segment, ...]
    verdict: Verdict | None = None
    retries: int = 0
    retries_per_step: int = 0
    expandable_segments_help: bool | None = None
    refused: Refused | None = None

    @property
    def unused_bytes(self) -> int:
        """What is reserved beyond the allocated peak: fragmentation."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


def reserve(
    profile: Profile,
    tape: Tape,
    plan: Plan,
    *,
    conf: AllocatorConf | None = None,
    limit_bytes: int | None = None,
    device_bytes: int | None = None,
    workspace_bytes: int = 0,
    resident_threads: int = 0,
    loading: Loading | None = None,
) -> Reserved:
    """Walk a job's steps. `limit_bytes` is what the driver has for segments, `device_bytes` the device's whole memory (the
    limit, if it is not given); `workspace_bytes` that of one cuBLAS workspace (`libraries.cublas_workspace_bytes`);
    `resident_threads` the GPU's (`Gpu.resident_threads`), without which sums over rows stage nothing; `loading` how the model gets
    there, None for a model that is built shard by shard with an empty cache.

    What loading and the first steps left is given back when the driver refuses. A job whose steps then repeat without
    another refusal fits.
    """
    conf = conf or AllocatorConf()
    result = _with_room(profile, tape, plan, conf, workspace_bytes, resident_threads, loading)
    if limit_bytes is None:
        return result
    device = device_bytes if device_bytes is not None else limit_bytes
    most = min(limit_bytes, int(conf.per_process_memory_fraction * device))
    if result.reserved_peak_bytes <= most and not conf.collects_garbage:
        return replace(result, verdict="fits")
    steps = traced(
        profile, tape, plan, workspace_bytes=workspace_bytes, resident_threads=resident_threads, loading=loading
    )
    walk = _Walk(steps, conf, limit_bytes, device)
    verdict = walk.verdict
    helps = None
    if verdict != "fits" and not conf.expandable_segments:
        other = _Walk(steps, replace(conf, expandable_segments=True), limit_bytes, device)
        helps = _RANK[other.verdict] < _RANK[verdict]
    return replace(
        result,
        reserved_peak_bytes=walk.allocator.driver.peak if verdict == "fits" else result.reserved_peak_bytes,
        verdict=verdict,
        retries=walk.allocator.retries,
        retries_per_step=walk.retries_per_step,
        expandable_segments_help=helps,
        refused=walk.refused,
    )


@lru_cache(maxsize=128)
def _with_room(
    profile: Profile,
    tape: Tape,
    plan: Plan,
    conf: AllocatorConf,
    workspace_bytes: int,
    resident_threads: int,
    loading: Loading | None,
) -> Reserved:
    """The walk without a limit. It is remembered: advice asks for it before an estimate does."""
    steps = traced(
        profile, tape, plan, workspace_bytes=workspace_bytes, resident_threads=resident_threads, loading=loading
    )
    walk = _Walk(steps, conf, None, None)
    return Reserved(
        allocated_peak_bytes=walk.allocator.allocated_peak,
        requested_peak_bytes=walk.allocator.requested_peak,
        reserved_peak_bytes=walk.allocator.driver.peak,
        steps_until_steady=walk.steady_after,
        segments=tuple(walk.allocator.segments()),
    )


def traced(
    profile: Profile,
    tape: Tape,
    plan: Plan,
    *,
    workspace_bytes: int = 0,
    resident_threads: int = 0,
    loading: Loading | None = None,
    batch_stands: bool = False,
) -> Steps:
    """Every storage of the plan's steps, kernels' scratch and cuBLAS workspaces included, and of `loading` before them.

    `batch_stands`: see `Trace.steps`.
    """
    schedule, score = schedule_for(profile, plan), composed(profile, tape, plan, scratch=True)
    played = tape.read()
    # FSDP1 takes a unit's parameters out of its flat one on the all-gather's stream, so autograd puts their gradients together there
    made_on = ALL_GATHER if plan.backend == "fsdp1" else COMPUTE
    at = sized(score, plan.micro_batch_size, plan.seq_len, resident_threads)
    trace = Trace(profile, played, at, gradient_stream=made_on)
    replay(profile, score.shape, schedule, plan.gradient_accumulation_steps, trace)
    workspaces = (round_up(workspace_bytes),) * WORKSPACES if workspace_bytes else ()
    rebuilt = rebuilt_buckets(profile, played, plan) if plan.backend == "ddp" else NO_STORAGES
    passing = tried(profile, plan) if plan.backend == "fsdp1" else NO_STORAGES
    return trace.steps(
        schedule.made_by_first_step,
        workspaces,
        loading.placed if loading else (),
        passing=passing,
        rebuilt=rebuilt,
        batch_stands=batch_stands,
    )


_RANK: dict[Verdict, int] = {"fits": 0, "fits_with_retries": 1, "does_not_fit": 2}


class _Walk:
    """The first step, then others until the state after one has been seen before.

    Between steps the state is where the storages lie that live on. Most were allocated once and never move, so it is decided
    by what was asked of the driver and by the storages that one step hands on to the next.
    """

    def __init__(self, steps: Steps, conf: AllocatorConf, limit_bytes: int | None, device_bytes: int | None) -> None:
        allocator = CachingAllocator(steps.requests, conf, limit_bytes=limit_bytes, device_bytes=device_bytes)
        self.allocator = allocator
        self.steady_after: int | None = None
        self.retries_per_step = 0
        self.refused: Refused | None = None
        seen: dict[tuple[int, ...], int] = {}
        retrying = 0
        try:
            allocator.run(steps.setup)
            allocator.allocated_peak, allocator.requested_peak = allocator.allocated, allocator.requested
            for number in range(1, MOST_STEPS + 1):
                before = allocator.retries
                allocator.run(steps.first if number == 1 else steps.following)
                allocator.begin_step()
                address = allocator.address
                for born, known in steps.handed_on:
                    address[known] = address[born]
                self.retries_per_step = allocator.retries - before
                retrying = retrying + 1 if self.retries_per_step else 0
                if retrying == RETRYING_STEPS:
                    break
                state = (allocator.driver.calls, *(address[known] for _, known in steps.handed_on))
                if state in seen:
                    self.steady_after = seen[state]
                    break
                seen[state] = number
        except OutOfMemory as error:
            phase, where = steps.where(error.storage)
            self.refused = Refused(phase=phase, where=where, asked_bytes=error.asked_bytes)

    @property
    def verdict(self) -> Verdict:
        if self.refused is not None:
            return "does_not_fit"
        # steps that repeat ask nothing of the driver: what retried came before them
        steady = self.steady_after is not None
        return "fits" if steady or not self.allocator.retries else "fits_with_retries"
