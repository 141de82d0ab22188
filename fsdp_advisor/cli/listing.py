"""`fsdp-advisor models` and `fsdp-advisor gpus`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdp_advisor.cli.options import ListOptions
from fsdp_advisor.cli.output import Destination, as_json, note
from fsdp_advisor.render.sizes import NONE
from fsdp_advisor.units import format_count, format_gib

if TYPE_CHECKING:
    from fsdp_advisor.hardware import Gpu
    from fsdp_advisor.model.catalog import Entry
    from fsdp_advisor.render.terminal import Screen


def models(options: ListOptions) -> int:
    """The models that are known without a download. PATTERN is a part of a name, or a kind such as moe or vision."""
    from fsdp_advisor.model.catalog import search

    destination = options.destination
    destination.check()
    found = search(options.pattern)
    if options.json:
        destination.write(as_json([entry.as_row() for entry in found]))
    else:
        _write_table(models_table(found, destination.screen()), options, destination)
    return 0


def gpus(options: ListOptions) -> int:
    """The GPUs that are known by name, with the memory that the driver offers. PATTERN is a part of a name, or an
    architecture such as hopper."""
    from fsdp_advisor.hardware import list_gpus

    destination = options.destination
    destination.check()
    found = list_gpus(options.pattern)
    if options.json:
        destination.write(as_json([asdict(gpu) for gpu in found]))
    else:
        _write_table(gpus_table(found, destination.screen()), options, destination)
    return 0


def _write_table(table: str, options: ListOptions, destination: Destination) -> None:
    if table:
        destination.write(table)
    else:
        note(f"nothing matches {options.pattern!r}")


def models_table(found: Sequence[Entry], screen: Screen) -> str:
    """The table of `models`; empty if `found` is."""
    if not found:
        return ""
    from fsdp_advisor.render.terminal import Column, draw, fitting

    columns = [
        Column("model", [e.id for e in found]),
        Column("parameters", [format_count(e.parameters) for e in found], right=True),
        Column("max tokens", [str(e.max_seq_len or NONE) for e in found], right=True, rank=1),
        Column("type", [e.model_type for e in found], rank=2),
        Column("task", [e.task for e in found], rank=3),
    ]
    return draw(fitting(columns, screen.width), screen)


def gpus_table(found: Sequence[Gpu], screen: Screen) -> str:
    """The table of `gpus`; empty if `found` is."""
    if not found:
        return ""
    from fsdp_advisor.render.terminal import Column, draw, fitting

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
