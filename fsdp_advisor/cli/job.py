"""A job's phases in words: what each takes, how to load and to save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_advisor.engines.job_peaks import JobPeaks, PhasePeak
from fsdp_advisor.engines.transfer import Files
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.verdict import PHASE_NAMES

if TYPE_CHECKING:
    from fsdp_advisor.cli.figures import Sizes


def job_lines(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """What `--explain` says of the job around the step. Nothing for a bare parameter count."""
    job, overhead = estimate.job, estimate.overhead
    if job is None or overhead is None:
        return []
    beside = _beside_tensors(estimate, sizes)
    low, high = sizes.near(overhead.low_bytes), sizes.near(overhead.high_bytes)
    parts = ", ".join(part.name for part in overhead.parts)
    return [
        *beside,
        f"The job on each GPU: {_by_phase(job, sizes)}",
        f"Beside PyTorch's memory: {low} to {high} ({parts})",
        f"Loading ({job.load_method.way}): {_on_host(job.phases['load'], sizes)}; {job.load_method.how}",
        *_other_loadings(job, sizes),
        f"Saving ({job.save_method.way}): {', '.join(_files(f, sizes) for f in job.save_method.files)}; "
        f"{_on_host(job.phases['save'], sizes)}",
    ]


def _beside_tensors(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """From tensors to what nvidia-smi shows."""
    taken, reserved = estimate.allocated, estimate.reserved
    if taken is None:
        return []
    parts = f"tensors {sizes.full(taken.tensor_bytes)}, kernels' scratch {sizes.near(taken.scratch_bytes)}, "
    parts += f"cuBLAS {sizes.near(taken.workspace_bytes)}"
    lines = [
        f"Allocated on a GPU: {sizes.full(estimate.peak_allocated_bytes or 0)} ({parts}); "
        f"simulated, the tensors peak at {sizes.full(estimate.peak_tensor_bytes or 0)}"
    ]
    if reserved is not None and estimate.verdict is not None:
        least, most = estimate.verdict.least_bytes, estimate.verdict.most_bytes
        lines.append(
            f"Reserved: {sizes.full(reserved.reserved_peak_bytes)}, of which {sizes.near(reserved.unused_bytes)} unused; "
            f"on the device {sizes.full(least)} to {sizes.full(most)}"
        )
    return lines


def _by_phase(job: JobPeaks, sizes: Sizes) -> str:
    known = {PHASE_NAMES[name]: peak.gpu_bytes for name, peak in job.phases.items()}
    return ", ".join(f"{name} {'unknown' if n is None else sizes.full(n)}" for name, n in known.items())


def _on_host(peak: PhasePeak, sizes: Sizes) -> str:
    n = peak.host_bytes_per_node
    return f"{sizes.near(n) if n else 'nothing'} of host memory per node"


def _other_loadings(job: JobPeaks, sizes: Sizes) -> list[str]:
    others = [m for m in job.load_methods if m is not job.load_method]
    if not others:
        return []
    said = (f"{w.way} {sizes.full(w.gpu_bytes)} and {sizes.full(w.host_bytes_per_node)}" for w in others)
    return [f"Other ways to load, on each GPU and on the host of a node: {', '.join(said)}"]


def _files(files: Files, sizes: Sizes) -> str:
    return f"{files.count} {'file' if files.count == 1 else 'files'} {files.name} of {sizes.near(files.tensor_bytes)}"
