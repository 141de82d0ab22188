"""A report as a document: its table, and the meaning of the columns. `markdown` returns it as Markdown, to paste into an issue."""

from __future__ import annotations

from fsdp_advisor.render.document import Block, Code, Paragraph, Table, to_markdown
from fsdp_advisor.render.explanation import ExplanationView
from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.sizes import UNKNOWN
from fsdp_advisor.render.view import ReportView, RowView


def markdown(view: ReportView, explained: ExplanationView | None = None) -> str:
    """The whole answer, without a final newline."""
    return to_markdown(report_blocks(view, explained))


def report_blocks(view: ReportView, explained: ExplanationView | None = None) -> list[Block]:
    """The whole answer."""
    is_textbook = any(row.textbook_text is not None for row in view.rows)
    header = [
        "strategy",
        "backend",
        *(["needs"] if view.peaks_known else []),
        *(["textbook"] if is_textbook else []),
        "states",
    ]
    header += [part.name for part in PARTS] if view.peaks_known else []
    header += [f"{view.throughput_unit} per GPU"] if view.timed else []
    header += ["host per node", "verdict"]
    blocks: list[Block] = [
        Paragraph(view.job),
        Table(header, [_cells(view, row) for row in view.rows], [False, False, *[True] * (len(header) - 3), False]),
        Paragraph(" ".join(view.footnotes)),
        *(Paragraph(f"Warning: {warning}") for warning in view.warnings),
        *map(Paragraph, view.omission_lines),
    ]
    if explained is not None:
        from fsdp_advisor.render.explanation_text import explanation_text
        from fsdp_advisor.render.terminal import Screen  # rich is slow to import

        blocks.append(Code(explanation_text(explained, Screen())))
    return blocks


def _cells(view: ReportView, row: RowView) -> list[str]:
    cells = [row.label, row.backend]
    if view.peaks_known:
        parts = [view.sizes.bare(n) for _, n in row.parts] if row.peak_known else [UNKNOWN] * len(PARTS)
        cells += [row.needed_text, row.states_text, *parts]
    else:
        cells += [row.states_text] if row.textbook_text is None else [row.textbook_text, row.states_text]
    return [*cells, *([row.throughput_text] if view.timed else []), row.host_text, row.verdict]
