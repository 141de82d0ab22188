"""Whole jobs: peaks, steadiness and verdicts."""

from __future__ import annotations

import pytest
from test_trace import JOBS, job

from fsdp_advisor import estimate
from fsdp_advisor.engines import states_of
from fsdp_advisor.engines.loading import loadings
from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, reserve, traced
from fsdp_advisor.memory.libraries import allocated

MIB = 2**20
WORKSPACE = 32 * MIB
EXPANDABLE = AllocatorConf(expandable_segments=True)
TINY, SMALL = "openai-community/gpt2", "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize("strategy", JOBS, ids="-".join)
@pytest.mark.parametrize("conf", [AllocatorConf(), EXPANDABLE], ids=["segments", "expandable"])
def test_peaks_are_in_order_and_the_state_repeats(strategy: tuple[str, str, str], conf: AllocatorConf) -> None:
    profile, tape, plan = job(SMALL, *strategy)
    result = reserve(profile, tape, plan, conf=conf, workspace_bytes=WORKSPACE)
    cheap = allocated(profile, tape, plan, workspace_bytes=WORKSPACE)
    assert result.allocated_peak_bytes <= result.reserved_peak_bytes
    if plan.backend == "fsdp1":  # which holds back for other streams what is no longer allocated
        assert cheap.peak_bytes < result.requested_peak_bytes <= result.reserved_peak_bytes
    else:
        assert cheap.peak_bytes == result.requested_peak_bytes <= result.allocated_peak_bytes
    assert result.steps_until_steady is not None and result.steps_until_steady <= 4
    assert sum(segment.n_bytes for segment in result.segments) == result.reserved_peak_bytes
    assert result.verdict is None
    if conf.expandable_segments and plan.backend != "fsdp1":
        assert result.allocated_peak_bytes == result.requested_peak_bytes  # every remainder is split off


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp1_on_one_rank_keeps_autograds_own_gradients(precision: str, accumulation: int) -> None:
    report = estimate(
        model=TINY, gpu="H100", backend="fsdp1", strategy="zero3", gpus=1, micro_batch_size=2, reserved=True,
        precision=precision, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    (one,) = report.estimates
    assert one.reserved is not None and one.allocated is not None and one.reserved.steps_until_steady is not None
    held_back = one.reserved.requested_peak_bytes - one.allocated.peak_bytes
    assert held_back >= 0 and (held_back == 0 or precision == "bf16-mixed")


def test_verdicts() -> None:
    profile, tape, plan = job(SMALL, "zero2", "fsdp2")
    roomy = reserve(profile, tape, plan, workspace_bytes=WORKSPACE)
    needed = roomy.reserved_peak_bytes

    def under(limit: int, conf: AllocatorConf | None = None):  # type: ignore[no-untyped-def]  # a shorthand
        return reserve(profile, tape, plan, conf=conf, limit_bytes=limit, workspace_bytes=WORKSPACE)

    assert under(needed).verdict == "fits" and under(needed).retries == 0
    tight = under(needed - 2 * MIB)
    assert tight.verdict == "fits_with_retries" and tight.retries_per_step > 0
    assert tight.reserved_peak_bytes == needed  # what it would take with room to spare
    hopeless = under(roomy.allocated_peak_bytes - 64 * MIB)
    assert hopeless.verdict == "does_not_fit" and hopeless.refused is not None
    assert hopeless.refused.phase in ("forward", "backward", "optimizer") and hopeless.refused.where
    assert hopeless.refused.asked_bytes > 0
    assert hopeless.expandable_segments_help is False
    assert under(needed, EXPANDABLE).expandable_segments_help is None


@pytest.mark.parametrize("strategy", [("ddp", "ddp"), ("zero3", "fsdp1")], ids="-".join)
def test_what_retries_in_the_first_steps_alone_fits(strategy: tuple[str, str]) -> None:
    profile, tape, plan = job(SMALL, *strategy)
    limit = reserve(profile, tape, plan).reserved_peak_bytes - 2 * MIB
    tight = reserve(profile, tape, plan, limit_bytes=limit)
    assert tight.verdict == "fits" and tight.retries > 0 and tight.retries_per_step == 0
    assert tight.reserved_peak_bytes <= limit and tight.expandable_segments_help is None


def test_expandable_segments_help_where_fragmentation_is_all_that_is_wrong() -> None:
    profile, tape, plan = job(SMALL, "zero3", "fsdp2")
    segments, expandable = (reserve(profile, tape, plan, conf=c) for c in (AllocatorConf(), EXPANDABLE))
    limit, device = expandable.reserved_peak_bytes, segments.reserved_peak_bytes
    assert limit < device
    between = reserve(profile, tape, plan, limit_bytes=limit, device_bytes=device)
    assert between.verdict != "fits" and between.expandable_segments_help is True


LOADED = [
    (backend, offload, framework)
    for backend in ("fsdp1", "fsdp2")
    for offload in ("none", "parameters")
    for framework in ("torch", "accelerate")
]


@pytest.mark.parametrize(("backend", "offload", "framework"), LOADED, ids=lambda value: value)
def test_a_job_begins_with_what_loading_leaves(backend: str, offload: str, framework: str) -> None:
    """The walk's beginning goes as high as loading does, and leaves what is kept."""
    profile, tape, plan = job(SMALL, "zero3", backend, offload, framework=framework)
    began = CachingAllocator((bare := traced(profile, tape, plan)).requests)
    began.run(bare.setup)
    ways = [way for way in loadings(profile, plan) if way.placed]
    assert ways
    for way in ways:
        steps = traced(profile, tape, plan, loading=way)
        allocator = CachingAllocator(steps.requests)
        allocator.run(steps.setup)
        buffers = states_of(profile, plan).buffers.rounded
        assert allocator.requested_peak == pytest.approx(way.gpu_bytes, abs=buffers)
        assert allocator.requested == began.requested
        assert allocator.driver.reserved > began.driver.reserved
        assert (steps.first, steps.following) == (bare.first, bare.following)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_deepspeed_leaves_the_model_that_it_moved(strategy: str) -> None:
    profile, tape, plan = job(SMALL, strategy, "deepspeed")
    way = next(way for way in loadings(profile, plan) if way.way == "every_rank")
    steps = traced(profile, tape, plan, loading=way)
    allocator = CachingAllocator(steps.requests)
    allocator.run(steps.setup)
    free = allocator.driver.reserved - allocator.allocated
    moved = profile.parameters * plan.compute_bytes
    assert free == pytest.approx(moved, rel=0.01)


def test_what_loading_left_is_given_back_where_it_is_in_the_way() -> None:
    """A light step of a model with a large embedding: its own segment is what loading leaves."""
    profile, tape, plan = job(SMALL, "zero3", "fsdp2", gpus=8, activation_checkpointing="full")
    way = next(way for way in loadings(profile, plan) if way.way == "every_rank")
    alone, after = reserve(profile, tape, plan), reserve(profile, tape, plan, loading=way)
    assert after.requested_peak_bytes == alone.requested_peak_bytes
    assert after.reserved_peak_bytes > alone.reserved_peak_bytes
    limit = (after.reserved_peak_bytes + alone.reserved_peak_bytes) // 2
    tight = reserve(profile, tape, plan, limit_bytes=limit, loading=way)
    assert tight.verdict == "fits" and tight.retries > 0 and tight.retries_per_step == 0
    assert tight.reserved_peak_bytes <= limit


def test_garbage_collection_is_walked_even_where_it_fits() -> None:
    profile, tape, plan = job(TINY, "zero3", "fsdp2")
    plain = reserve(profile, tape, plan)
    conf = AllocatorConf(garbage_collection_threshold=0.5, per_process_memory_fraction=0.9)
    collected = reserve(profile, tape, plan, conf=conf, limit_bytes=2 * plain.reserved_peak_bytes)
    assert collected.verdict == "fits"
    assert collected.reserved_peak_bytes <= plain.reserved_peak_bytes


def test_a_fraction_of_the_device_is_the_limit() -> None:
    profile, tape, plan = job(TINY, "ddp", "ddp")
    needed = reserve(profile, tape, plan).reserved_peak_bytes
    conf = AllocatorConf(per_process_memory_fraction=0.5)
    assert reserve(profile, tape, plan, conf=conf, limit_bytes=2 * needed).verdict == "fits"
    assert reserve(profile, tape, plan, conf=conf, limit_bytes=needed).verdict != "fits"
