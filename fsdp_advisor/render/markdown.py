"""A report as a Markdown table, to paste into an issue."""

from __future__ import annotations

from fsdp_advisor.render.explanation import ExplanationView
from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.sizes import UNKNOWN
from fsdp_advisor.render.view import ReportView, RowView


def markdown(view: ReportView, explained: ExplanationView | None = None) -> str:
    """The whole answer, without a final newline."""
    header = ["strategy", "backend", *(["needs"] if view.peaks_known else []), "states"]
    header += [part.name for part in PARTS] if view.peaks_known else []
    header += [f"{view.throughput_unit} per GPU"] if view.timed else []
    header += ["host per node", "verdict"]
    alignment = ["---", "---", *["---:"] * (len(header) - 3), "---"]
    blocks = [
        _escape(view.job),
        "\n".join(_line(cells) for cells in (header, alignment, *(_cells(view, row) for row in view.rows))),
        _escape(" ".join(view.footnotes)),
        *(f"Warning: {_escape(warning)}" for warning in view.warnings),
        *map(_escape, view.omission_lines),
    ]
    if explained is not None:
        from fsdp_advisor.render.terminal import Screen  # rich is slow to import
        from fsdp_advisor.render.text import explanation_text

        blocks.append(f"```text\n{explanation_text(explained, Screen())}\n```")
    return "\n\n".join(blocks)


def _cells(view: ReportView, row: RowView) -> list[str]:
    cells = [row.label, row.backend]
    if view.peaks_known:
        parts = [view.sizes.bare(n) for _, n in row.parts] if row.peak_known else [UNKNOWN] * len(PARTS)
        cells += [row.needed_text, row.states_text, *parts]
    else:
        cells.append(row.states_text)
    return [*cells, *([row.throughput_text] if view.timed else []), row.host_text, row.verdict]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escape(text: str) -> str:
    """Names are shown as they are: no emphasis, no tags."""
    for character in "\\`*_<":
        text = text.replace(character, "\\" + character)
    return text
