"""An estimate as a Markdown table, to paste into an issue."""

from __future__ import annotations

from fsdp_advisor.cli.figures import (
    NONE,
    PARTS,
    UNKNOWN,
    Sizes,
    assumed,
    counted,
    left_out,
    parts_of,
    speed,
    warnings,
)
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.verdict import in_words


def markdown(report: Report, explained: StrategyEstimate | None = None) -> str:
    """The whole answer, without a final newline."""
    sizes = Sizes.of(report)
    known = any(e.needed_bytes is not None for e in report.estimates)
    header = ["strategy", "backend", *(["needs", *(p.meaning for p in PARTS)] if known else ["states"])]
    timed = any(e.step is not None for e in report.estimates)
    header += [*([f"{counted(report)}/s per GPU"] if timed else []), "host per node", "verdict"]
    rows = []
    for e in report.estimates:
        if not known:
            figures = [sizes.full(e.kept_bytes)]
        elif e.needed_bytes is None:
            figures = [UNKNOWN, sizes.full(e.kept_bytes), *[UNKNOWN] * (len(PARTS) - 1)]
        else:
            figures = [sizes.full(e.needed_bytes), *(sizes.full(n_bytes) for _, n_bytes in parts_of(e))]
        host = sizes.full(e.host_bytes_per_node) if e.host_bytes_per_node else NONE
        rows.append(
            [
                e.label,
                e.plan.backend,
                *figures,
                *([speed(report, e)] if timed else []),
                host,
                in_words(report, e, sizes.full),
            ]
        )
    blocks = [
        _escape(assumed(report, sizes)),
        "\n".join([_row(header), _row(["---", "---", *["---:"] * (len(header) - 3), "---"]), *map(_row, rows)]),
        *(f"Warning: {_escape(warning)}" for warning in warnings(report)),
        *([f"Not in these figures: {_escape(omitted)}."] if (omitted := left_out(report)) else []),
    ]
    if explained is not None:
        from fsdp_advisor.cli.explain import explanation  # rich is not needed without it
        from fsdp_advisor.cli.output import Screen

        blocks.append(f"```text\n{explanation(report, explained, Screen())}\n```")
    return "\n\n".join(blocks)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escape(text: str) -> str:
    """Names are shown as they are: no emphasis, no tags."""
    for character in "\\`*_<":
        text = text.replace(character, "\\" + character)
    return text
