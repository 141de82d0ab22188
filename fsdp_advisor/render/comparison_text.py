"""Two jobs in two columns, and their differences with the largest effect first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from fsdp_advisor.comparison import Comparison, Difference, Side
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.render.sizes import UNKNOWN, Sizes, format_rate
from fsdp_advisor.render.terminal import Screen, wrap
from fsdp_advisor.render.view import model_text, report_view, why_unknown
from fsdp_advisor.units import format_gib
from fsdp_advisor.verdict import verdict_text

_PLAN = (
    "gpus", "nnodes", "gpu", "strategy", "backend", "offload", "framework", "precision", "optim",
    "optim_args", "optim_target_modules", "micro_batch_size",
    "gradient_accumulation_steps", "seq_len", "activation_checkpointing", "attention", "wrap", "allocator_conf",
)  # fmt: skip
"""The options that the columns show even if they are equal."""
UNSET = "-"
_GAP = "  "
_LEAST = 12
"""The fewest characters of a column."""


def comparison_text(found: Comparison, screen: Screen) -> str:
    """The answer in one sentence, both plans, and a line per difference, at the screen's width."""
    lines = [wrap(answer(found), screen), "", *_columns(found, screen.width), ""]
    for line in _differences(found):
        start = line[: len(line) - len(line.lstrip())]
        lines.append(wrap(line.lstrip(), screen, indent=start * 2, first=start))
    return "\n".join(lines)


def answer(found: Comparison) -> str:
    """A sentence about which of the jobs fits, and which change makes the other one fit."""
    a, b = (f"{name} {_fit(side)}" for name, side in (("A", found.a), ("B", found.b)))
    joined = f"{a}; {b}."
    cures = [d for d in found.differences if d.cures]
    if found.a.row.fits and found.b.row.fits is False:
        if found.cure:
            changed = [n for n in found.cure if getattr(found.a.request, n) != getattr(found.b.request, n)]
            return f"{joined} B fits with A's {' and '.join(map(dashed, changed))} together."
        if not cures:
            return f"{joined} No single difference makes B fit."
        return f"{joined} B fits with A's {' or '.join(_names(d) for d in cures)}."
    return joined


def _fit(side: Side) -> str:
    report, row = side.report, side.row
    fits = {True: "fits", False: "does not fit", None: "may fit"}[row.fits]
    memory = format_gib(report.gpu_memory_bytes)
    if row.needed_bytes is not None:
        return f"{fits} {report.gpu_name}: it needs {format_gib(row.needed_bytes)} of {memory}"
    return f"{fits} {report.gpu_name}, which has {memory}: {verdict_text(report, row)} ({why_unknown(row)})"


def _columns(found: Comparison, width: int) -> Iterator[str]:
    """The rows of both plans. Options that neither job has are left out; cells are wrapped where the lines would be wider than `width`."""
    a, b = found.a, found.b
    differing = {name for d in found.differences for name, x, y in zip(d.options, d.a, d.b, strict=True) if x != y}
    rows = [("", "A", "B"), ("model", model_text(a.report), model_text(b.report))]
    names = dict.fromkeys((*_PLAN, *(n for d in found.differences for n in d.options if n in differing - {"model"})))
    for name in names:
        values = _shown(getattr(a.request, name)), _shown(getattr(b.request, name))
        if values == (UNSET, UNSET):
            continue
        mark = "* " if name in differing else "  "
        rows.append((mark + name.replace("_", " "), *values))
    figures = [(f"  {name}", x, y) for (name, x), (_, y) in zip(_figures(a), _figures(b), strict=True)]
    rows += [row for row in figures if row[1:] != (UNSET, UNSET)]
    first = max(len(name) for name, _, _ in rows)
    room = max((width - first - 2 * len(_GAP)) // 2, _LEAST)
    second = min(max(len(left) for _, left, _ in rows), room)
    for name, left, right in rows:
        cells = (textwrap.wrap(left, second) or [""], textwrap.wrap(right, room) or [""])
        for number, (x, y) in enumerate(zip_longest(*cells, fillvalue="")):
            yield f"{'' if number else name:<{first}}{_GAP}{x:<{second}}{_GAP}{y}".rstrip()


def _figures(side: Side) -> list[tuple[str, str]]:
    view = report_view(side.report)
    sizes, row = Sizes.of(side.report), side.row
    shown = view.rows[0]
    return [
        (f"needs, {sizes.unit}", sizes.bare(row.needed_bytes)),
        (f"of the GPU's, {sizes.unit}", sizes.bare(side.report.gpu_memory_bytes)),
        (f"states, {sizes.unit}", sizes.bare(row.kept_bytes)),
        (f"host per node, {sizes.unit}", sizes.bare_or_none(row.host_bytes_per_node)),
        (f"{view.throughput_unit} per GPU", UNKNOWN if shown.throughput is None else format_rate(shown.throughput)),
        ("verdict", verdict_text(side.report, row, sizes.full)),
    ]


def _differences(found: Comparison) -> Iterator[str]:
    if not found.differences:
        yield "The two jobs are the same."
        return
    yield "Differences, largest effect first. Effect: A with B's value for this, and nothing else changed."
    for d in found.differences:
        changes = ", ".join(
            f"{dashed(name)} {_shown(x)} -> {_shown(y)}"
            for name, x, y in zip(d.options, d.a, d.b, strict=True)
            if x != y
        )
        yield f"  {changes}: {_effect(d)}{'; B fits with the value of A' if d.cures else ''}"


def _effect(d: Difference) -> str:
    if d.reason is not None:
        return f"impossible alone ({'; '.join(d.reason.splitlines())})"
    if d.needed_bytes is None and d.step_time is None:
        return "unknown"
    memory = "memory unknown" if d.needed_bytes is None else _memory(d.needed_bytes)
    return f"{memory}, {_time(d.step_time)}"


def _memory(n_bytes: int) -> str:
    if not n_bytes:
        return "same memory"
    return f"{format_gib(abs(n_bytes))} {'more' if n_bytes > 0 else 'less'}"


def _time(factor: float | None) -> str:
    if factor is None:
        return "time unknown"
    if abs(factor - 1) < 0.005:
        return "same time"
    return f"{abs(factor - 1):.0%} {'more' if factor > 1 else 'less'} time per token"


def _names(d: Difference) -> str:
    return " and ".join(dashed(name) for name, x, y in zip(d.options, d.a, d.b, strict=True) if x != y)


def _shown(value: Any) -> str:
    return UNSET if value is None else str(value)
