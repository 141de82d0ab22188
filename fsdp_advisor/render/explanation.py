"""The explanation of one row (`--explain`), prepared for display: memory at the peak, through the step and in the phases of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_advisor.engines.job_peaks import JobPeaks, PhasePeak
from fsdp_advisor.engines.transfer import SaveMethod
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.program.accounts import ACCOUNTS, JobPhase
from fsdp_advisor.render.parts import PARTS, MemoryPart
from fsdp_advisor.render.sizes import Sizes, format_seconds
from fsdp_advisor.render.view import ReportView, RowView
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.timing import StepTime

MEANINGS = ACCOUNTS | NON_TENSOR_PARTS
_PART_OF: Mapping[str, MemoryPart] = {account: part for part in PARTS for account in part.accounts}
_PHASE_NAMES: Mapping[JobPhase, str] = {
    "load": "load", "first_step": "first step", "steady_step": "steady step", "generate": "generate", "score": "score",
    "train": "train", "evaluate": "evaluate", "save": "save",
}  # fmt: skip
CAUSES: Mapping[str, str] = {
    "matmul": "matrix multiplications",
    "attention": "attention kernels",
    "pointwise": "the other kernels, which are limited by memory",
    "loss": "the loss",
    "recomputation": "the forwards that activation checkpointing repeats",
    "launch": "the GPU waits for the CPU to launch kernels",
    "sharding": "copies into and out of communication buffers, sums of gradients",
    "communication": "collectives that no compute hides",
    "contention": "the slowdown of compute by the collectives that it hides",
    "optimizer": "the optimizer step on the GPU",
    "host": "PCIe, and the optimizer step on the host",
    "allocator": "allocator retries",
}
"""The descriptions of the parts of a step's time."""
_SMALL_SHARE = 0.005
"""Parts of a step's time below this share are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of what a GPU needs: an account of tensors, or memory outside tensors. `share` is of the sum."""

    name: str
    meaning: str
    part: MemoryPart
    n_bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationView:
    """The explanation of one row. `components` sum to `needed_bytes`; `timeline` is tensor memory through the step."""

    heading: str
    phases: str
    components: tuple[Component, ...]
    total_text: str
    lines: tuple[str, ...]
    timeline: tuple[TimelinePoint, ...]
    gpu_memory_bytes: int
    sizes: Sizes


def explanation_view(view: ReportView, row: RowView, estimate: StrategyEstimate) -> ExplanationView:
    """The explanation of `row`, which is `estimate`'s row in `view`."""
    sizes = view.sizes
    heading = f"{row.label} ({row.backend})"
    phases = ""
    if estimate.peak_tensor_bytes is None:
        heading += ": the peak is unknown"
    else:
        needed = estimate.needed_bytes
        heading += ": the peak of evaluation is unknown; " if needed is None else f": needs {sizes.full(needed)}; "
        heading += f"tensors peak at {sizes.full(estimate.peak_tensor_bytes)} in {estimate.peak_phase}, at {estimate.peak_where}"
        highest = (f"{phase} {sizes.full(n)}" for phase, n in (estimate.phase_peaks or {}).items())
        phases = f"Tensor peak by phase: {', '.join(highest)}"
    lines = [
        *_loss_lines(estimate, sizes),
        *([f"FSDP units: {estimate.units}"] if estimate.units else []),
        _states_line(estimate, sizes),
        f"Host memory per node: {_host_bytes_text(row.host_bytes_per_node, sizes)}",
        *_job_lines(estimate, sizes),
        *_time_lines(estimate.step, row, view.throughput_unit),
        *([f"Also not modelled for this row: {'; '.join(row.specific_omissions)}"] if row.specific_omissions else []),
    ]
    return ExplanationView(
        heading=heading,
        phases=phases,
        components=components(estimate.needed_breakdown or {}),
        total_text=row.needed_text,
        lines=tuple(lines),
        timeline=estimate.timeline,
        gpu_memory_bytes=view.gpu_memory_bytes,
        sizes=sizes,
    )


def components(needed: Mapping[str, int]) -> tuple[Component, ...]:
    """The components that are not empty, the largest first."""
    total = sum(needed.values()) or 1
    return tuple(
        Component(
            name=account.replace("_", " "),
            meaning=MEANINGS[account],
            part=_PART_OF[account],
            n_bytes=n,
            share=n / total,
        )
        for account, n in sorted(needed.items(), key=lambda item: -item[1])
        if n
    )


def share_text(share: float) -> str:
    """A share as a percentage.

    >>> share_text(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def _loss_lines(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """Lines about the memory of the loss at the peak, and the most that a fused or chunked loss saves (without counting its own tiles)."""
    if estimate.at_peak is None or estimate.peak_tensor_bytes is None or estimate.fused_loss_peak_bytes is None:
        return []
    saved = estimate.peak_tensor_bytes - estimate.fused_loss_peak_bytes
    loss = f"Loss (logits and their gradients): {sizes.scaled(estimate.at_peak['loss'])} at the peak"
    if saved * 1000 < estimate.peak_tensor_bytes:
        return [f"{loss}; a loss that never has all logits (--loss) saves nothing, because the peak is elsewhere"]
    return [
        f"{loss}; a loss that never has all logits (--loss) saves at most {sizes.scaled(saved)}: "
        f"tensors then peak at {sizes.full(estimate.fused_loss_peak_bytes)}, plus the loss's own tiles"
    ]


def _states_line(estimate: StrategyEstimate, sizes: Sizes) -> str:
    states = ", ".join(f"{name} {sizes.scaled(n)}" for name, n in estimate.states.items() if n)
    if not states:
        return "Kept between steps: nothing on the GPU"
    if estimate.backend_keeps_bytes is not None:
        kept = f"Kept between steps: {sizes.scaled(estimate.kept_bytes)} by {estimate.backend}"
        return f"{kept}, {sizes.scaled(sum(estimate.states.values()))} by the textbook ({states})"
    paged = f"; paged: {sizes.scaled(n)}" if (n := estimate.paged_optimizer_bytes) else ""
    return f"Kept between steps: {sizes.scaled(estimate.kept_bytes)} ({states}){paged}"


def _job_lines(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """Memory outside tensors, and the phases of the job; nothing for a bare parameter count."""
    job, overhead = estimate.job_peaks, estimate.overhead
    if job is None or overhead is None:
        return []
    lines = []
    if (allocator := estimate.allocator) is not None:
        lines.append(
            f"PyTorch's allocator: {sizes.full(allocator.allocated_peak_bytes)} allocated, "
            f"{sizes.full(allocator.reserved_peak_bytes)} reserved"
        )
    low, high = sizes.scaled(overhead.low_bytes), sizes.scaled(overhead.high_bytes)
    return [
        *lines,
        f"Outside PyTorch: {low} to {high} ({', '.join(part.name for part in overhead.parts)})",
        f"Tensors on each GPU by phase of the job: {_gpu_by_phase(job, sizes)}",
        f"Loading ({job.load_method.way}): {_host_text(job.phases['load'], sizes)}; {job.load_method.how}",
        *_other_loadings(job, sizes),
        f"Saving ({job.save_method.way}): {_files_text(job.save_method, sizes)}; {_host_text(job.phases['save'], sizes)}",
        *_merging(job, sizes),
    ]


def _files_text(method: SaveMethod, sizes: Sizes) -> str:
    return ", ".join(
        f"{f.count} {'file' if f.count == 1 else 'files'} {f.name} of {sizes.scaled(f.tensor_bytes)}"
        for f in method.files
    )


def _merging(job: JobPeaks, sizes: Sizes) -> list[str]:
    """Merging the adapters after training; nothing if there are none to merge."""
    if job.merge is None or job.merge_peak is None:
        return []
    on_gpu = f"tensors on the GPU {sizes.full(job.merge_peak.gpu_bytes)}; " if job.merge_peak.gpu_bytes else ""
    host = _host_text(job.merge_peak, sizes)
    return [f"Merging the adapters: {on_gpu}{_files_text(job.merge, sizes)}; {host}; {job.merge.how}"]


def _gpu_by_phase(job: JobPeaks, sizes: Sizes) -> str:
    return ", ".join(
        f"{_PHASE_NAMES[name]} {'unknown' if peak.gpu_bytes is None else sizes.full(peak.gpu_bytes)}"
        for name, peak in job.phases.items()
    )


def _host_bytes_text(n_bytes: int | None, sizes: Sizes) -> str:
    if n_bytes is None:
        return "unknown"
    return sizes.full(n_bytes) if n_bytes else "none"


def _host_text(peak: PhasePeak, sizes: Sizes) -> str:
    n = peak.host_bytes_per_node
    if n is None:
        return "unknown host memory per node"
    return f"{sizes.scaled(n) if n else 'no'} host memory per node"


def _other_loadings(job: JobPeaks, sizes: Sizes) -> list[str]:
    others = [method for method in job.load_methods if method is not job.load_method]
    if not others:
        return []
    texts = (f"{m.way} {sizes.full(m.gpu_bytes)} and {sizes.full(m.host_bytes_per_node)}" for m in others)
    return [f"Other ways to load, on each GPU and on each host: {', '.join(texts)}"]


def _time_lines(step: StepTime | None, row: RowView, unit: str) -> list[str]:
    """The step's time with its range, and its parts, the largest first."""
    if step is None:
        return []
    ends = f"{format_seconds(step.low_seconds)} to {format_seconds(step.high_seconds)}"
    parts = sorted(((seconds, name) for name, seconds in step.breakdown.items()), reverse=True)
    shares = (
        f"{name} {seconds / step.seconds:.0%} ({CAUSES[name]})"
        for seconds, name in parts
        if seconds >= _SMALL_SHARE * step.seconds
    )
    return [
        f"Step: {format_seconds(step.seconds)} ({ends}), {row.throughput_text} {unit} per GPU, MFU {step.mfu:.0%}"
        " (attention and padding count in full)",
        f"Time by cause: {'; '.join(shares)}",
    ]
