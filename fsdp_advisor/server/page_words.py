"""The words that several parts of the page use."""

from __future__ import annotations

from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_count, format_gib

TIMES = " \u00d7 "


def job(report: Report) -> list[str]:
    """What the figures are of, in a few words each."""
    request = report.request
    nodes = f" on {request.nnodes} nodes" if request.nnodes > 1 else ""
    words = [
        f"{report.model_name}, {format_count(report.parameters)} parameters",
        f"{request.gpus}{TIMES}{report.gpu_name}{nodes}",
        f"{request.micro_batch_size}{TIMES}{report.seq_len:,} tokens per GPU",
        request.precision,
        request.optim,
        request.attention,
    ]
    if request.gradient_accumulation_steps > 1:
        words.append(f"{request.gradient_accumulation_steps} micro-batches a step")
    words.append(f"{request.activation_checkpointing.replace('none', 'no')} activation checkpointing")
    return words


def verdict(report: Report, estimate: StrategyEstimate) -> str:
    """Whether it fits, and by how much."""
    need = estimate.needed_bytes
    if need is not None:
        room = report.gpu_memory_bytes - need
        return f"fits, {format_gib(room)} free" if estimate.fits else f"needs {format_gib(-room)} more"
    if estimate.fits is False:
        return f"states alone need {format_gib(kept(estimate) - report.gpu_memory_bytes)} more"
    return "peak unknown"


def kept(estimate: StrategyEstimate) -> int:
    """What stays on the GPU from step to step."""
    return sum(estimate.states.values())
