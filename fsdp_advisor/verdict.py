"""Whether a job fits, and by how much, in the words that every interface uses."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib


def verdict_text(report: Report, estimate: StrategyEstimate, full: Callable[[int], str] = format_gib) -> str:
    """The verdict on a row: `fits, 6.64 GiB free`, `lacks 8.85 GiB`, or which peak is unknown. `full` writes bytes with their unit."""
    if estimate.fits is None:
        if estimate.needed_bytes is not None:
            return "fits the GPU, host memory unknown"
        return "peak unknown" if estimate.peak_tensor_bytes is None else "steps fit, peak of evaluation unknown"
    if estimate.needed_bytes is None or estimate.headroom_bytes is None:
        return _lacks_without_peak(report, estimate, full)
    if estimate.fits:
        return f"fits, {full(estimate.headroom_bytes)} free{_retries(estimate)}"
    if estimate.headroom_bytes >= 0 and estimate.vllm_missing_bytes:
        return f"vLLM lacks {full(estimate.vllm_missing_bytes)}"
    if estimate.headroom_bytes >= 0:
        return f"host lacks {full(_missing_host_bytes(report, estimate))}"
    return f"{_worst_phase(estimate)}lacks {full(-estimate.headroom_bytes)}"


def _lacks_without_peak(report: Report, estimate: StrategyEstimate, full: Callable[[int], str]) -> str:
    """The verdict if the peak is unknown but states, loading, saving or the host already need too much; else empty."""
    if (missing := missing_for_states(report, estimate)) > 0:
        return f"states alone lack {full(missing)}"
    if (host := _missing_host_bytes(report, estimate)) > 0:
        return f"host lacks {full(host)}"
    return f"does not fit in {(estimate.fails_in or 'the step').replace('_', ' ')}"


def missing_for_states(report: Report, estimate: StrategyEstimate) -> int:
    """By how much the GPU's memory is too small for the states, CUDA and NCCL alone; not positive if it is large enough."""
    overhead = 0 if estimate.overhead is None else estimate.overhead.middle_bytes
    return estimate.kept_bytes + overhead - report.gpu_memory_bytes


def _worst_phase(estimate: StrategyEstimate) -> str:
    """The word before the verdict: `load `, `generate `, `evaluate ` or `save ` if that phase needs more than the steps; else empty."""
    device = estimate.peak_device_bytes
    if estimate.job_peaks is None or device is None or estimate.needed_bytes is None or estimate.needed_bytes <= device:
        return ""
    return f"{estimate.worst_outside_steps} "


def _retries(estimate: StrategyEstimate) -> str:
    """The words about the cost of allocator retries; empty if there are none."""
    n = estimate.allocator_retries_per_step
    if not n:
        return ""
    slower = ""
    if estimate.step is not None:
        lost = estimate.step.breakdown["allocator"]
        slower = f" (about {lost / (estimate.step.seconds - lost):.0%} slower)"
    return f" with {n} allocator {'retry' if n == 1 else 'retries'} per step{slower}"


def _missing_host_bytes(report: Report, estimate: StrategyEstimate) -> int:
    """By how much a node's memory is too small for the worst phase of the job; not positive if it is large enough."""
    available = report.request.host_memory
    if available is None or estimate.job_peaks is None:
        return 0
    return max(phase.host_bytes_per_node or 0 for phase in estimate.job_peaks.phases.values()) - available
