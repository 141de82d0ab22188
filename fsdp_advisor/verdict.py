"""Whether it fits, and by how much, in the words that every face uses."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib

PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady step", "save": "save"}


def in_words(report: Report, estimate: StrategyEstimate, full: Callable[[int], str] = format_gib) -> str:
    """`fits, 6.64 GiB free`; or what is missing, and in which phase. `full` writes bytes with their unit."""
    has, needs = report.gpu_memory_bytes, estimate.needed_bytes
    if estimate.fits is None:
        return "peak unknown"
    if estimate.fits:
        if needs is None or needs > has:
            return "fits, but slowly"
        return f"fits, {full(has - needs)} free"
    if needs is not None and needs > has:
        return f"needs {full(needs - has)} more"
    if (failing := _failing_phase(report, estimate, full)) is not None:
        return failing
    if needs is not None:
        return "does not fit: fragmentation"
    return f"states alone need {full(estimate.kept_bytes - has)} more"


def _failing_phase(report: Report, estimate: StrategyEstimate, full: Callable[[int], str]) -> str | None:
    """The phase of the job that fails."""
    job, overhead = estimate.job, estimate.overhead
    if job is None or overhead is None or job.fails is None:
        return None
    short = (job.phases[job.fails].gpu_bytes or 0) + overhead.low_bytes - report.gpu_memory_bytes
    if short <= 0:
        short = (job.phases[job.fails].host_bytes_per_node or 0) - (report.request.host_memory or 0)
        return f"host needs {full(short)} more"
    return f"{PHASE_NAMES[job.fails]} fails: needs {full(short)} more"
