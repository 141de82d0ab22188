"""The words that several parts of the page use."""

from __future__ import annotations

from fsdp_advisor.report import Report
from fsdp_advisor.units import format_count

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
