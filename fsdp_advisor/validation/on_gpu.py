"""The prediction of a run on a GPU: the estimate with this GPU's kernels, and the allocator simulated through the run's own steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import (
    AllocatorConf,
    AllocatorSegment,
    CachingAllocator,
    OutOfMemory,
    step_operations,
)
from fsdp_advisor.memory.allocator.conf import conf_in
from fsdp_advisor.memory.device import DeviceOverhead, device_overhead
from fsdp_advisor.memory.libraries import cublas_workspace_bytes
from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.step_figures import StepInput, allocator_result, peak_of_step, timeline_of_step
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tapes import recorded_gpu_tape
from fsdp_advisor.validation.choices import Mode

WARM_UP_STEPS = 2
"""Steps before the counted ones: the optimizer makes its states, cuBLAS its workspaces, and DDP rebuilds its buckets."""
COUNTED_STEPS: dict[Mode, int] = {"stand-in": 2, "measure": 3}

PhasePeaks = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """A run on a GPU: the step's profile, tape and plan, and the other inputs of the allocator.

    `gpu_keeps_up`: the GPU finishes its work before the host's next allocation, as in CUDA without kernels. `newest_first`: see
    `takes_newest_first`.
    """

    profile: Profile
    tape: Tape
    plan: Plan
    gpu: Gpu
    mode: Mode
    conf: AllocatorConf
    workspace_bytes: int
    overhead: DeviceOverhead
    gpu_keeps_up: bool = False
    newest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrediction:
    """The prediction of a run. `figures` replace those of `estimate`; `segments` are the allocator's at the end of the run."""

    estimate: StrategyEstimate
    fits: bool | None
    figures: dict[str, Any]
    timeline: tuple[TimelinePoint, ...]
    segments: tuple[AllocatorSegment, ...]


def effective_conf(request: EstimateRequest) -> str | None:
    """The allocator's configuration during a run of the request: the request's, or else the environment's."""
    return request.allocator_conf or conf_in(os.environ)


def gpu_run_of(model: Resolved, plan: Plan, gpu: Gpu, mode: Mode, conf: AllocatorConf) -> GpuRun:
    """The run of a plan on a GPU. A stand-in has a fake process group, so it has no memory of NCCL."""
    assert model.profile is not None
    grouped = plan if mode == "measure" else replace(plan, strategy="ddp", backend="ddp", mesh=Mesh())
    lazy_loading = os.environ.get("CUDA_MODULE_LOADING", "LAZY") != "EAGER"
    return GpuRun(
        profile=model.profile,
        tape=recorded_gpu_tape(model, plan, gpu),
        plan=plan,
        gpu=gpu,
        mode=mode,
        conf=conf,
        workspace_bytes=cublas_workspace_bytes(gpu.compute_capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG")),
        overhead=device_overhead(gpu, grouped, lazy_loading=lazy_loading),
    )


def predict_on_gpu(model: Resolved, run: GpuRun) -> GpuPrediction:
    """The figures of a run on a GPU.

    A run takes steps only: it neither loads nor saves a checkpoint, and its cache is empty before the first step. If the steps fit
    only by releasing cached memory, the figures include that. If they do not fit, the figures are those of a larger GPU.
    """
    try:
        phases, segments = simulate_allocator_over_run(run, limited=True)
        fits = True
    except OutOfMemory:
        phases, segments = simulate_allocator_over_run(run, limited=False)
        fits = False
    return GpuPrediction(
        estimate=_estimate_of_run(model, run, fits),
        fits=fits,
        figures=_figures(run, phases),
        timeline=timeline_of_step(run.profile, run.tape, run.plan),
        segments=tuple(segments),
    )


def _estimate_of_run(model: Resolved, run: GpuRun, fits: bool) -> StrategyEstimate:
    """The estimate of the plan for the conditions of a run: its kernels, workspaces and NCCL, without checkpoints."""
    plan, gpu, overhead = run.plan, run.gpu, run.overhead
    step = StepInput(run.profile, run.tape, plan, gpu)
    allocator = allocator_result(step, conf=run.conf, overhead=overhead, workspace_bytes=run.workspace_bytes)
    needed = allocator.reserved_peak_bytes + overhead.middle_bytes
    return replace(
        estimate_plan(model, plan, gpu),
        fits=fits,
        needed_bytes=needed,
        headroom_bytes=gpu.memory_bytes - needed,
        allocator=allocator,
        overhead=overhead,
    )


def _figures(run: GpuRun, phases: PhasePeaks) -> dict[str, Any]:
    """The run's figures under the names of the JSON interface."""
    step = peak_of_step(run.profile, run.tape, run.plan)
    overhead = run.overhead
    peaks = {f"peak_{name}": max(peaks[name] for peaks in phases.values()) for name in phases["forward"]}
    reserved = peaks["peak_reserved_bytes"]
    figures: dict[str, Any] = {
        "peak_tensor_bytes": step.peak,
        **peaks,
        "peak_device_bytes": reserved + overhead.middle_bytes,
        "peak_device_bytes_range": [reserved + overhead.low_bytes, reserved + overhead.high_bytes],
        "peak_phase": step.phase,
        "phase_peaks": step.phase_peaks,
        "at_peak": step.at_peak,
        "phases": phases,
    }
    if (context := next((part for part in overhead.parts if part.name == "CUDA context"), None)) is not None:
        figures["context_bytes_range"] = [context.low_bytes, context.high_bytes]
    return figures


def simulate_allocator_over_run(run: GpuRun, *, limited: bool) -> tuple[PhasePeaks, Iterator[AllocatorSegment]]:
    """The peaks of each phase over the steps after warm-up, and the segments at the end of the run. All steps use the same batch.

    `limited`: the allocator has only the memory that the GPU's overhead leaves. Raises OutOfMemory then.
    """
    steps = step_operations(
        step_program(run.profile, run.tape, run.plan),
        *run.plan.tape_shape,
        resident_threads=run.gpu.resident_threads,
        workspace_bytes=[run.workspace_bytes] * run.plan.facts.threads,
        one_batch=True,
    )
    allocator = CachingAllocator(
        steps.requests,
        run.conf,
        limit_bytes=run.gpu.memory_bytes - run.overhead.middle_bytes if limited else None,
        device_bytes=run.gpu.memory_bytes if limited else None,
        gpu_keeps_up=run.gpu_keeps_up,
        newest_first=run.newest_first,
    )
    starts = [at for at, _, _ in steps.visits[1:]]
    parts = [
        (phase, steps.following[begin:end])
        for (_, phase, _), begin, end in zip(steps.visits, [0, *starts], [*starts, None], strict=True)
    ]
    phases: PhasePeaks = {}
    allocator.run(steps.setup)
    n_steps = WARM_UP_STEPS + COUNTED_STEPS[run.mode]
    for number in range(n_steps):
        for phase, operations in [("", steps.first)] if number == 0 else parts:
            peaks = _run(allocator, operations)
            if number >= WARM_UP_STEPS:
                so_far = phases.setdefault(phase, peaks)
                phases[phase] = {name: max(so_far[name], peaks[name]) for name in peaks}
        if number == n_steps - 1:
            break  # blocks used on other streams stay allocated until the next malloc; there is none
        allocator.begin_step(steps.carried_over)
    return phases, allocator.segments()


def _run(allocator: CachingAllocator, operations: tuple[int, ...]) -> dict[str, int]:
    """The allocator's peaks while `operations` run. Earlier peaks do not count, as after `reset_peak_memory_stats`."""
    allocator.allocated_peak, allocator.requested_peak = allocator.allocated, allocator.requested
    allocator.driver.peak = allocator.driver.reserved
    allocator.run(operations)
    return {
        "allocated_bytes": allocator.allocated_peak,
        "reserved_bytes": allocator.driver.peak,
        "requested_bytes": allocator.requested_peak,
    }
