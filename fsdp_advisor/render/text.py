"""A report as text: the job, a row per strategy, and what the columns and warnings mean."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.text import Text

from fsdp_advisor.program.accounts import GROUPS
from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.sizes import UNKNOWN
from fsdp_advisor.render.terminal import Column, Screen, bar, draw, fitting, legend, paint, widths, wrap
from fsdp_advisor.render.view import ReportView, RowView

if TYPE_CHECKING:
    from fsdp_advisor.render.explanation import ExplanationView

BAR_WIDTHS = (8, 24)
"""Characters of the narrowest and of the widest bar in the table."""
VERDICT_WIDTH = 36
"""Longer verdicts take several lines."""
_STYLE = {True: "green", False: "red", None: "yellow"}


def text(view: ReportView, screen: Screen, explained: ExplanationView | None = None) -> str:
    """The whole answer, without a final newline."""
    table = fitting(_columns(view), screen.width - BAR_WIDTHS[0] - 2)
    fits = widths(table) + BAR_WIDTHS[0] + 2 <= screen.width
    body = _table(view, table, screen) if fits else "\n".join(_card(view, row, screen) for row in view.rows)
    blocks = [wrap(view.job, screen), body, _notes(view, screen, hint=explained is None)]
    if explained is not None:
        from fsdp_advisor.render.explanation_text import explanation_text  # most answers have none

        blocks.append(explanation_text(explained, screen))
    return "\n\n".join(blocks)


def _columns(view: ReportView) -> list[Column]:
    """All columns except the bar."""
    rows = view.rows
    columns = [Column("strategy", [row.strategy for row in rows])]
    if view.offloads:
        columns.append(Column("offload", [row.offload for row in rows]))
    columns.append(Column("backend", [row.backend for row in rows]))
    if view.peaks_known:
        columns.append(Column("needs", [row.needed_text for row in rows], right=True))
        columns.append(Column("states", [row.states_text for row in rows], right=True, rank=1))
        columns += [Column(part.name, _part_cells(view, i), right=True, rank=2) for i, part in enumerate(PARTS)]
    else:
        textbook = [row.textbook_text for row in rows if row.textbook_text is not None]
        for name in GROUPS["states"]:
            header = name[0].upper() if textbook else name
            columns.append(Column(header, [row.state_texts[name] for row in rows], right=True, rank=2))
        if textbook:
            columns.append(Column("textbook", textbook, right=True))
        columns.append(Column("states", [row.states_text for row in rows], right=True))
    if view.timed:
        columns.append(Column(view.throughput_unit, [row.throughput_text for row in rows], right=True, rank=1))
    if view.uses_host:
        columns.append(Column("host", [row.host_text for row in rows], right=True))
    verdicts = [Text(textwrap.fill(row.verdict, VERDICT_WIDTH), style=_STYLE[row.fits]) for row in rows]
    return [*columns, Column("verdict", verdicts)]


def _part_cells(view: ReportView, index: int) -> list[str]:
    """One part of every row; the peak of some rows may be unknown."""
    return [view.sizes.bare(row.parts[index][1]) if row.peak_known else UNKNOWN for row in view.rows]


def _table(view: ReportView, columns: list[Column], screen: Screen) -> str:
    narrow, wide = BAR_WIDTHS
    width = max(narrow, min(wide, screen.width - widths(columns) - 2))
    header = "of the GPU"
    bars = Column(header if width >= len(header) else "", [_bar(view, row, width, screen) for row in view.rows])
    at = next(i for i, column in enumerate(columns) if column.header in ("host", "verdict"))
    return draw([*columns[:at], bars, *columns[at:]], screen)


def _bar(view: ReportView, row: RowView, width: int, screen: Screen) -> Text:
    return bar(row.parts, view.gpu_memory_bytes, width, screen)


def _card(view: ReportView, row: RowView, screen: Screen) -> str:
    """A few lines of a row, for a screen that is too narrow for the table."""
    unit = view.sizes.unit
    if row.peak_known:
        items = [f"needs {row.needed_text} {unit}", f"states {row.states_text} {unit}"]
        made = f"at the peak: {'; '.join(f'{part.meaning} {view.sizes.bare(n)}' for part, n in row.parts)}"
    else:
        items = [] if row.textbook_text is None else [f"textbook {row.textbook_text} {unit}"]
        items.append(f"states {row.states_text} {unit}")
        made = ", ".join(f"{name} {size}" for name, size in row.state_texts.items())
    if row.throughput is not None:
        items.append(f"{row.throughput_text} {view.throughput_unit} per GPU")
    if row.host_bytes_per_node:
        items.append(f"host {row.host_text} {unit} per node")
    verdict = Text(wrap(f"{row.label}: {row.verdict}", screen), style=_STYLE[row.fits])
    width = min(screen.width - 2, 2 * BAR_WIDTHS[1])
    return "\n".join(
        [
            paint(verdict, screen),
            paint(Text("  ") + _bar(view, row, width, screen), screen),
            wrap(f"{'; '.join(items)} ({row.backend})", screen, first="  ", indent="  "),
            wrap(made, screen, first="  ", indent="  "),
        ]
    )


def _notes(view: ReportView, screen: Screen, *, hint: bool) -> str:
    """The legend, what the columns mean, warnings, and what is not modelled. With `hint` also how to see more, and the way out."""
    lines = [
        legend(view.legend, screen),
        wrap(" ".join(view.footnotes), screen),
        *(wrap(f"warning: {warning}", screen, indent="  ") for warning in view.warnings),
        *(wrap(line, screen, indent="  ") for line in view.omission_lines),
    ]
    if hint and view.explain_hint:
        lines.append(wrap(view.explain_hint, screen, indent="  "))
    if hint and view.way_out:
        lines.append(wrap(view.way_out, screen, indent="  "))
    return "\n".join(lines)
