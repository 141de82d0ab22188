"""What a job reserves: its steps walked through the caching allocator until the allocator's state repeats.

It begins with what loading has left in the cache: whole units or tensors from which shards were made are freed, but their
segments stay with PyTorch. (The pictures in huggingface/accelerate, benchmarks/fsdp2/imgs, show it of a model's embedding.)

Assumed: the host reads the loss after each step, gradients are set to None. The host runs ahead of the GPU as far as it is let
(FSDP1's limit on all-gathers, the queue of kernel launches), which holds back what `record_stream` marks; collectives keep pace
with computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fsdp_advisor.engines import schedule_for
from fsdp_advisor.engines.ddp.schedule import rebuilt_buckets
from fsdp_advisor.engines.fsdp1.schedule import tried
from fsdp_advisor.engines.transfer import Loading
from fsdp_advisor.engines.wrapping import marked, marks_for
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
class AllocatorResult:
    """What a job's steps take of the caching allocator. Bytes.

    `verdict` says whether the steps run within the limit: `fits`, `fits_with_retries` (every steady step frees the cache and
    asks the driver again), `does_not_fit`. The peaks are those within the limit if the steps run there, else those without a
    limit. `allocated_peak_bytes` is `max_memory_allocated`, `reserved_peak_bytes` `max_memory_reserved`,
    `requested_peak_bytes` `requested_bytes.all.peak`. `steps_until_steady` is None if the state never repeated.
    `expandable_segments_help`: whether that setting ends the retries or makes the job fit; None if it was not tried.
    `segments` are those at the end of the last step.
    """

    allocated_peak_bytes: int
    requested_peak_bytes: int
    reserved_peak_bytes: int
    verdict: Verdict
    retries_per_step: int = 0
    steps_until_steady: int | None = None
    expandable_segments_help: bool | None = None
    refused: Refused | None = None
    segments: tuple[Segment, ...] = field(default=(), repr=False)

    @property
    def unused_bytes(self) -> int:
        """Reserved beyond the allocated peak: fragmentation."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


def simulate_allocator(
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
) -> AllocatorResult:
    """Run a job's steps through the caching allocator.

    `limit_bytes` is what the driver has for segments (None: no limit), `device_bytes` the device's whole memory (default:
    the limit), `workspace_bytes` the size of one cuBLAS workspace, `resident_threads` the GPU's (`Gpu.resident_threads`),
    `loading` how the weights reach the GPU (None: shard by shard into an empty cache).
    """
    conf = conf or AllocatorConf()
    steps = traced(
        profile, tape, plan, workspace_bytes=workspace_bytes, resident_threads=resident_threads, loading=loading
    )
    walk = _Walk(steps, conf, limit_bytes, device_bytes)
    verdict, peaks, helps = walk.verdict, walk, None
    if verdict == "does_not_fit":
        peaks = _Walk(steps, conf, None, None)
    if verdict != "fits" and not conf.expandable_segments and _near(peaks, limit_bytes):
        other = _Walk(steps, replace(conf, expandable_segments=True), limit_bytes, device_bytes)
        helps = _RANK[other.verdict] < _RANK[verdict]
    return AllocatorResult(
        allocated_peak_bytes=peaks.allocator.allocated_peak,
        requested_peak_bytes=peaks.allocator.requested_peak,
        reserved_peak_bytes=peaks.allocator.driver.peak,
        verdict=verdict,
        retries_per_step=walk.retries_per_step if verdict == "fits_with_retries" else 0,
        steps_until_steady=peaks.steady_after,
        expandable_segments_help=helps,
        refused=walk.refused,
        segments=tuple(peaks.allocator.segments()),
    )


def _near(walk: _Walk, limit_bytes: int | None) -> bool:
    """Whether the job would fit without any fragmentation."""
    return limit_bytes is not None and walk.allocator.allocated_peak <= limit_bytes


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
    played = marked(profile, tape, marks_for(profile, plan)).read()
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
