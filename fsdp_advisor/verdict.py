"""Whether it fits, and by how much, in the words that every face uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib

PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady step", "save": "save"}
_AROUND_THE_STEP = ("load", "save")


def in_words(report: Report, estimate: StrategyEstimate, full: Callable[[int], str] = format_gib) -> str:
    """`fits, 6.64 GiB free`; or the most that is missing, and in which phase. `full` writes bytes with their unit.

    What is allocated is the least that a step needs, what the allocator would reserve with room for everything the most; where
    it was not walked only the one end is known: `at least`, and of what is free `up to`.
    """
    has, needs, walked = report.gpu_memory_bytes, estimate.needed_bytes, estimate.reserved is not None
    if estimate.fits is None:
        return "peak unknown"
    if estimate.fits:
        if needs is None or needs > has:
            return "fits, but slowly"
        return f"fits, {'' if walked else 'up to '}{full(has - needs)} free"
    lack, phase = max(_lacks_on_gpu(report, estimate))
    if lack > 0:
        if phase != "step":
            return f"{phase} fails: needs at least {full(lack)} more"
        if needs is None:
            return f"states alone need {full(lack)} more"
        return (
            f"needs {full(lack).split()[0]} to {full(needs - has)} more"
            if walked
            else f"needs at least {full(lack)} more"
        )
    on_host = max(_lacks_on_host(report, estimate), default=0)
    if on_host > 0:
        return f"host needs {full(on_host)} more"
    if not walked:
        return "does not fit beside CUDA and NCCL"
    return (
        f"fragmentation needs up to {full(needs - has)} more"
        if needs and needs > has
        else "does not fit: fragmentation"
    )


def _lacks_on_gpu(report: Report, estimate: StrategyEstimate) -> Iterator[tuple[int, str]]:
    """By how much a step, loading and saving are each certainly beyond a GPU: the least that each needs, against what there is."""
    has, overhead = report.gpu_memory_bytes, estimate.overhead
    if estimate.allocated is None or overhead is None:
        yield estimate.kept_bytes - has, "step"
    else:
        yield estimate.allocated.peak_bytes + overhead.middle_bytes - has, "step"
    if estimate.job is not None and overhead is not None:
        for phase in _AROUND_THE_STEP:
            yield (estimate.job.phases[phase].gpu_bytes or 0) + overhead.low_bytes - has, PHASE_NAMES[phase]


def _lacks_on_host(report: Report, estimate: StrategyEstimate) -> Iterator[int]:
    """By how much each phase is beyond a node's memory; nothing where that is not known."""
    if estimate.job is not None and report.request.host_memory is not None:
        for peak in estimate.job.phases.values():
            yield (peak.host_bytes_per_node or 0) - report.request.host_memory
