"""What the estimate says of a run on a GPU: with the kernels that the GPU at hand takes, and the allocator walked as the run walks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_advisor.estimator import estimate_plan, reserved_beside
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, OutOfMemory, Segment, traced
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.memory.ledger import ACCOUNTS, Point
from fsdp_advisor.memory.libraries import allocated, cublas_workspace_bytes
from fsdp_advisor.memory.step import replayed, timeline
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.tapes import recorded_gpu_tape
from fsdp_advisor.validation.records import Rung

WARM_UP = 2
"""Steps before those that count: states are made, cuBLAS takes its workspaces, DDP rebuilds its buckets."""
STEADY: dict[Rung, int] = {"stand-in": 2, "measure": 3}
"""Steps that count, by rung."""

CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch looks for the allocator's settings, the first that is set. Source: c10/core/AllocatorConfig.h (torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """One plan on one GPU. `figures` go over the estimate's own of the same names; `segments` stand when the run ends."""

    estimate: StrategyEstimate
    fits: bool
    figures: dict[str, Any]
    timeline: tuple[Point, ...]
    segments: tuple[Segment, ...]


def conf_in_force(request: EstimateRequest) -> str | None:
    """The allocator's settings that a run of the request has: its own, else the environment's."""
    return request.allocator_conf or next((os.environ[name] for name in CONF_VARIABLES if os.environ.get(name)), None)


def estimate_on(model: Resolved, plan: Plan, gpu: Gpu, rung: Rung, conf: AllocatorConf) -> OnGpu:
    """`fits` is of the steps alone: a run neither loads a checkpoint nor saves one, and begins with an empty cache.

    The figures are those of the run itself: where cached memory has to be given back they stay within the GPU's memory, while
    the estimate says what the steps take with room to spare. Of a run that does not fit there is that alone.
    A stand-in's process group is a fake one, so it has no NCCL.
    """
    assert model.profile is not None
    profile = model.profile
    tape = recorded_gpu_tape(model, plan, gpu)
    grouped = plan if rung == "measure" else replace(plan, shard_degree=1, replica_degree=1, nnodes=1)
    overhead = device_overhead(gpu, grouped, lazy_loading=os.environ.get("CUDA_MODULE_LOADING", "LAZY") != "EAGER")
    workspace_bytes = cublas_workspace_bytes(gpu.compute_capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    reserved, judged = reserved_beside(overhead, profile, tape, plan, gpu, conf=conf, workspace_bytes=workspace_bytes)
    ledger = replayed(profile, tape, plan)
    run = partial(
        walked_as_run,
        profile,
        tape,
        plan,
        conf,
        workspace_bytes=workspace_bytes,
        resident_threads=gpu.resident_threads,
        n_steps=WARM_UP + STEADY[rung],
    )
    try:
        phases, segments = run(limit_bytes=gpu.memory_bytes - overhead.middle_bytes, device_bytes=gpu.memory_bytes)
        fits = True
    except OutOfMemory:
        phases, segments = run()
        fits = False
    context = next((part for part in overhead.parts if part.name == "CUDA context"), None)
    peaks = {f"peak_{name}": max(of_phase[name] for of_phase in phases.values()) for name in phases["forward"]}
    figures: dict[str, Any] = {
        "peak_tensor_bytes": ledger.peak,
        **peaks,
        "peak_device_bytes": peaks["peak_reserved_bytes"] + overhead.middle_bytes,
        "peak_device_bytes_range": [
            peaks["peak_reserved_bytes"] + n_bytes for n_bytes in (overhead.low_bytes, overhead.high_bytes)
        ],
        "peak_phase": ledger.peak_phase,
        "phase_peaks": ledger.phase_peaks,
        "at_peak": dict(zip(ACCOUNTS, ledger.at_peak, strict=False)),
        "phases": phases,
    }
    if context is not None:
        figures["context_bytes_range"] = [context.low_bytes, context.high_bytes]
    estimate = replace(
        estimate_plan(model, plan, gpu),
        fits=fits,
        fits_by="peak_device_bytes",
        needed_bytes=judged.needed_bytes,
        headroom_bytes=gpu.memory_bytes - judged.needed_bytes,
        allocated=allocated(
            profile, tape, plan, workspace_bytes=workspace_bytes, resident_threads=gpu.resident_threads
        ),
        reserved=reserved,
        verdict=judged,
        overhead=overhead,
    )
    return OnGpu(
        estimate=estimate, fits=fits, figures=figures, timeline=timeline(profile, tape, plan), segments=tuple(segments)
    )


def walked_as_run(
    profile: Profile,
    tape: Tape,
    plan: Plan,
    conf: AllocatorConf,
    *,
    workspace_bytes: int,
    resident_threads: int,
    n_steps: int,
    limit_bytes: int | None = None,
    device_bytes: int | None = None,
    gpu_keeps_up: bool = False,
) -> tuple[dict[str, dict[str, int]], Iterator[Segment]]:
    """The allocator through exactly the steps that a run takes, which are of one and the same batch; limits as for `reserve`.

    The peaks of each phase over the steps that count, under the words that a run measures; and the segments in the end.
    Raises OutOfMemory.
    """
    steps = traced(
        profile, tape, plan, workspace_bytes=workspace_bytes, resident_threads=resident_threads, batch_stands=True
    )
    allocator = CachingAllocator(
        steps.requests, conf, limit_bytes=limit_bytes, device_bytes=device_bytes, gpu_keeps_up=gpu_keeps_up
    )
    starts = [at for at, _, _ in steps.places[1:]]
    parts = [
        (phase, steps.following[begin:end])
        for (_, phase, _), begin, end in zip(steps.places, [0, *starts], [*starts, None], strict=True)
    ]
    phases: dict[str, dict[str, int]] = {}
    allocator.run(steps.setup)
    for number in range(n_steps):
        for phase, operations in [("", steps.first)] if number == 0 else parts:
            peaks = _run(allocator, operations)
            if number >= WARM_UP:
                so_far = phases.setdefault(phase, peaks)
                phases[phase] = {name: max(so_far[name], peaks[name]) for name in peaks}
        if number == n_steps - 1:
            break  # what other streams are done with is held until the next malloc, which does not come
        allocator.begin_step()
        for born, known in steps.handed_on:
            allocator.address[known] = allocator.address[born]
    return phases, allocator.segments()


def _run(allocator: CachingAllocator, operations: tuple[int, ...]) -> dict[str, int]:
    """The peaks of a stretch, as `reset_peak_memory_stats` at its start gives them."""
    allocator.allocated_peak, allocator.requested_peak = allocator.allocated, allocator.requested
    allocator.driver.peak = allocator.driver.reserved
    allocator.run(operations)
    return {
        "allocated_bytes": allocator.allocated_peak,
        "reserved_bytes": allocator.driver.peak,
        "requested_bytes": allocator.requested_peak,
    }
