"""Whether it fits, and by how much, in the words that every face uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib

PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady step", "save": "save"}
_AROUND_THE_STEP = ("load", "save")


def in_words(report: Report, estimate: StrategyEstimate, full: Callable[[int], str] = format_gib) -> str:
    """`fits, 6.64 GiB free`; or the most that is missing, and in which phase. `full` writes bytes with their unit.

    A step lacks at least what it allocates beyond the GPU, and at most what the allocator would reserve with room for
    everything: `lacks 0.85-15.21 GiB`. Where the allocator was not walked the first alone is known: `lacks 8.85+ GiB`.
    """
    has, needs, walked = report.gpu_memory_bytes, estimate.needed_bytes, estimate.reserved is not None
    if estimate.fits is None:
        return "peak unknown"
    if estimate.fits:
        return "fits, but slowly" if needs is None or needs > has else f"fits, {full(has - needs)} free"
    lack, phase = max(_lacks_on_gpu(report, estimate))
    if lack > 0 and phase != "step":
        return f"{phase} {_at_least(lack, full)}"
    if lack > 0 and needs is None:
        return f"states alone lack {full(lack)}"
    if lack > 0:
        return f"lacks {full(lack).split()[0]}-{full(needs - has)}" if walked and needs else _at_least(lack, full)
    on_host = max(_lacks_on_host(report, estimate), default=0)
    if on_host > 0:
        return f"host lacks {full(on_host)}"
    if needs is not None and needs > has:
        return f"lacks up to {full(needs - has)}"  # all of it fragmentation
    return "does not fit: fragmentation" if walked else "does not fit beside CUDA and NCCL"


def _at_least(lack: int, full: Callable[[int], str]) -> str:
    """`lacks 8.85+ GiB`."""
    number, unit = full(lack).split()
    return f"lacks {number}+ {unit}"


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
