"""What `models` and `gpus` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_advisor.render.sizes import NONE
from fsdp_advisor.render.terminal import Column, Screen, draw, fitting
from fsdp_advisor.units import format_count, format_gib

if TYPE_CHECKING:
    from fsdp_advisor.hardware import Gpu
    from fsdp_advisor.model.catalog import Entry


def models_table(found: Sequence[Entry], screen: Screen) -> str:
    """Empty where nothing was found."""
    if not found:
        return ""
    columns = [
        Column("model", [e.id for e in found]),
        Column("parameters", [format_count(e.parameters) for e in found], right=True),
        Column("max tokens", [str(e.max_seq_len or NONE) for e in found], right=True, rank=1),
        Column("type", [e.model_type for e in found], rank=2),
        Column("task", [e.task for e in found], rank=3),
    ]
    return draw(fitting(columns, screen.width), screen)


def gpus_table(found: Sequence[Gpu], screen: Screen) -> str:
    """Empty where nothing was found."""
    if not found:
        return ""
    columns = [
        Column("gpu", [g.name for g in found]),
        Column("memory", [format_gib(g.memory_bytes) for g in found], right=True),
        Column("bf16 TFLOP/s", [_scaled(g.bf16_flops, 1e12) for g in found], right=True, rank=1),
        Column("memory GB/s", [_scaled(g.memory_bytes_per_s, 1e9) for g in found], right=True, rank=2),
        Column("architecture", [g.architecture or NONE for g in found], rank=3),
        Column("full name", [g.full_name for g in found], rank=4),
    ]
    return draw(fitting(columns, screen.width), screen)


def _scaled(rate: float | None, unit: float) -> str:
    return NONE if rate is None else f"{rate / unit:.0f}"
