"""Whether a job fits, and by how much, in the words that every interface uses."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib

PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady step", "save": "save"}


def verdict_text(report: Report, estimate: StrategyEstimate, full: Callable[[int], str] = format_gib) -> str:
    """`fits, 6.64 GiB free`, or what is missing: `lacks 8.85 GiB`. `full` writes bytes with their unit."""
    if estimate.fits is None:
        return "peak unknown"
    if estimate.needed_bytes is None or estimate.headroom_bytes is None:
        return f"states alone lack {full(max(estimate.kept_bytes - report.gpu_memory_bytes, 0))}"
    if estimate.fits:
        return f"fits, {full(estimate.headroom_bytes)} free{_retries(estimate)}"
    if estimate.headroom_bytes >= 0:
        return _host_lacks(report, estimate, full)
    return f"{_worst_phase(estimate)}lacks {full(-estimate.headroom_bytes)}"


def _worst_phase(estimate: StrategyEstimate) -> str:
    """`load ` or `save ` if that phase needs more than the steps."""
    if not (estimate.needed_breakdown or {}).get("loading_or_saving") or estimate.job is None:
        return ""
    load, save = (estimate.job.phases[name].gpu_bytes or 0 for name in ("load", "save"))
    return "load " if load >= save else "save "


def _retries(estimate: StrategyEstimate) -> str:
    """What allocator retries cost; nothing where there are none."""
    n = estimate.allocator_retries_per_step
    if not n:
        return ""
    slower = ""
    if estimate.step is not None:
        lost = estimate.step.breakdown["allocator"]
        slower = f" (about {lost / (estimate.step.seconds - lost):.0%} slower)"
    return f" with {n} allocator {'retry' if n == 1 else 'retries'} per step{slower}"


def _host_lacks(report: Report, estimate: StrategyEstimate, full: Callable[[int], str]) -> str:
    """The job fits the GPU; a node's memory is too small for one of its phases."""
    available, phases = report.request.host_memory, estimate.job.phases.values() if estimate.job else ()
    needed = max((phase.host_bytes_per_node or 0 for phase in phases), default=0)
    return f"host lacks {full(needed - (available or 0))}"
