"""A job's phases in words: what each takes, how to load and to save, and which phase fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_advisor.memory.job import JobPeaks, PhasePeak
from fsdp_advisor.memory.saving import Files
from fsdp_advisor.report import Report, StrategyEstimate

if TYPE_CHECKING:
    from fsdp_advisor.cli.figures import Sizes  # which names the failing phase with `failure`

PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady step", "save": "save"}


def job_lines(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """What `--explain` says of the job around the step. Nothing for a bare parameter count."""
    job, overhead = estimate.job, estimate.overhead
    if job is None or overhead is None:
        return []
    low, high = sizes.near(overhead.low_bytes), sizes.near(overhead.high_bytes)
    parts = ", ".join(part.name for part in overhead.parts)
    return [
        f"The job on each GPU: {_by_phase(job, sizes)}",
        f"Beside PyTorch's memory: {low} to {high} ({parts})",
        f"Loading ({job.loading.way}): {_on_host(job.phases['load'], sizes)}; {job.loading.how}",
        *_other_loadings(job, sizes),
        f"Saving ({job.saving.way}): {', '.join(_files(f, sizes) for f in job.saving.files)}; "
        f"{_on_host(job.phases['save'], sizes)}",
    ]


def failure(report: Report, estimate: StrategyEstimate, sizes: Sizes) -> str | None:
    """Which phase of the job fails, where it is not the step's tensors alone that are too large."""
    job, overhead = estimate.job, estimate.overhead
    if job is None or overhead is None or job.fails is None:
        return None
    gpu_bytes = job.phases[job.fails].gpu_bytes or 0
    short = gpu_bytes + overhead.low_bytes - report.gpu_memory_bytes
    name = PHASE_NAMES[job.fails]
    if short <= 0:
        return f"{name} fails: the node's memory is too small"
    beside = " beside CUDA and NCCL" if gpu_bytes <= report.gpu_memory_bytes else ""
    return f"{name} fails: needs {sizes.full(short)} more{beside}"


def _by_phase(job: JobPeaks, sizes: Sizes) -> str:
    known = {PHASE_NAMES[name]: peak.gpu_bytes for name, peak in job.phases.items()}
    return ", ".join(f"{name} {'unknown' if n is None else sizes.full(n)}" for name, n in known.items())


def _on_host(peak: PhasePeak, sizes: Sizes) -> str:
    n = peak.host_bytes_per_node
    return f"{sizes.near(n) if n else 'nothing'} of host memory per node"


def _other_loadings(job: JobPeaks, sizes: Sizes) -> list[str]:
    others = [way for way in job.loadings if way is not job.loading]
    if not others:
        return []
    said = (f"{w.way} {sizes.full(w.gpu_bytes)} and {sizes.full(w.host_bytes_per_node)}" for w in others)
    return [f"Other ways to load, on each GPU and on the host of a node: {', '.join(said)}"]


def _files(files: Files, sizes: Sizes) -> str:
    return f"{files.count} {'file' if files.count == 1 else 'files'} {files.name} of {sizes.near(files.tensor_bytes)}"
