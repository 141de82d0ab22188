"""The text view of an estimate: what is assumed, a row per strategy, what is left out."""

from __future__ import annotations

from rich.text import Text

from fsdp_advisor.cli.drawing import Column, bar, draw, fitting, legend, paint, widths, wrap
from fsdp_advisor.cli.explain import explanation
from fsdp_advisor.cli.figures import (
    NONE,
    PARTS,
    UNKNOWN,
    Part,
    Sizes,
    assumed,
    counted,
    left_out,
    parts_of,
    speed,
    warnings,
)
from fsdp_advisor.cli.output import Screen
from fsdp_advisor.cli.selection import row_name
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.verdict import in_words

BAR_WIDTHS = (8, 24)
"""The narrowest bar that tells anything, and the widest that tells more."""
_STATES = PARTS[0]
_STYLE = {True: "green", False: "red", None: "yellow"}


def text(report: Report, screen: Screen, explained: StrategyEstimate | None = None) -> str:
    """The whole answer as text, without a final newline."""
    sizes = Sizes.of(report)
    columns = _columns(report, sizes)
    table = fitting(columns, screen.width - BAR_WIDTHS[0] - 2)
    if widths(table) + BAR_WIDTHS[0] + 2 <= screen.width:
        body = _table(report, table, screen)
        speed_shown = any(column.header == f"{counted(report)}/s" for column in table)
    else:
        body = _cards(report, sizes, screen)
        speed_shown = False
    blocks = [
        wrap(assumed(report, sizes), screen),
        body,
        _below(report, sizes, screen, speed_shown=speed_shown, explained=explained is not None),
    ]
    if explained is not None:
        blocks.append(explanation(report, explained, screen))
    return "\n\n".join(blocks)


def _columns(report: Report, sizes: Sizes) -> list[Column]:
    """All but the bar."""
    estimates = report.estimates
    columns = [
        Column("strategy", [e.label.partition(" ")[0] for e in estimates]),
        Column("offload", [e.plan.offload.replace("none", NONE) for e in estimates]),
        Column("backend", [e.plan.backend for e in estimates]),
    ]
    if not any(e.plan.offload != "none" for e in estimates):
        del columns[1]
    if any(e.needed_bytes is not None for e in estimates):
        columns.append(Column("needs", [_or_unknown(e.needed_bytes, sizes) for e in estimates], right=True))
        columns += [
            Column(p.name, [_part(p, e, sizes) for e in estimates], right=True, rank=1 if p is _STATES else 2)
            for p in PARTS
        ]
    else:
        columns += [
            Column(name, [sizes.bare(e.states[name]) for e in estimates], right=True, rank=2)
            for name in ("parameters", "gradients", "optimizer")
        ]
        columns.append(Column("states", [sizes.bare(e.kept_bytes) for e in estimates], right=True))
    if report.request.reserved or report.request.allocator_conf:
        walked = [_or_unknown(e.peak_reserved_bytes, sizes) for e in estimates]
        columns.append(Column("reserved", walked, right=True, rank=1))
    if any(e.step is not None for e in estimates):
        columns.append(Column(f"{counted(report)}/s", [speed(report, e) for e in estimates], right=True, rank=1))
    host = [sizes.bare(e.host_bytes_per_node) if e.host_bytes_per_node else NONE for e in estimates]
    if any(cell != NONE for cell in host):
        columns.append(Column("host", host, right=True))
    verdicts = [Text(in_words(report, e, sizes.full), style=_STYLE[e.fits]) for e in estimates]
    return [*columns, Column("verdict", verdicts)]


def _or_unknown(n_bytes: int | None, sizes: Sizes) -> str:
    return UNKNOWN if n_bytes is None else sizes.bare(n_bytes)


def _part(part: Part, estimate: StrategyEstimate, sizes: Sizes) -> str:
    if (needed := estimate.needed_breakdown) is not None:
        return sizes.bare(part.of(needed))
    return sizes.bare(estimate.kept_bytes) if part is _STATES else UNKNOWN


def _table(report: Report, columns: list[Column], screen: Screen) -> str:
    narrow, wide = BAR_WIDTHS
    width = max(narrow, min(wide, screen.width - widths(columns) - 2))
    bars = Column("of the GPU", [_bar(report, e, width, screen) for e in report.estimates])
    if width < len(bars.header):
        bars = Column("", bars.cells)
    at = next(i for i, c in enumerate(columns) if c.header in ("host", "verdict"))
    return draw([*columns[:at], bars, *columns[at:]], screen)


def _bar(report: Report, estimate: StrategyEstimate, width: int, screen: Screen) -> Text:
    return bar(parts_of(estimate), report.gpu_memory_bytes, width, screen)


def _cards(report: Report, sizes: Sizes, screen: Screen) -> str:
    """Three lines a row, for a screen that no table fits."""
    cards = []
    for e in report.estimates:
        need = e.needed_bytes
        if need is not None:
            made = "; ".join(f"{part.meaning} {sizes.bare(n)}" for part, n in parts_of(e))
        else:
            made = ", ".join(f"{name} {sizes.bare(n)}" for name, n in e.states.items() if n)
        head = f"needs {sizes.full(need)}" if need is not None else f"states alone {sizes.full(e.kept_bytes)}"
        rate = f"; {speed(report, e)} {counted(report)}/s per GPU" if e.step is not None else ""
        host = f"; host {sizes.full(e.host_bytes_per_node)} per node" if e.host_bytes_per_node else ""
        judged = Text(wrap(f"{e.label}: {in_words(report, e, sizes.full)}", screen), style=_STYLE[e.fits])
        lines = [
            paint(judged, screen),
            paint(Text("  ") + _bar(report, e, min(screen.width - 2, 2 * BAR_WIDTHS[1]), screen), screen),
            wrap(f"{head}{rate}{host} ({e.plan.backend})", screen, first="  ", indent="  "),
            wrap(made, screen, first="  ", indent="  "),
        ]
        cards.append("\n".join(line for line in lines if line))
    return "\n".join(cards)


def _below(report: Report, sizes: Sizes, screen: Screen, *, speed_shown: bool, explained: bool) -> str:
    known = next((e for e in report.estimates if e.needed_bytes is not None), None)
    states = "States per GPU" + (", by the textbook" if sizes.decimal else "")
    what = "What a GPU needs at the step's peak" if known else states
    decides = known and any(e.reserved is None for e in report.estimates)
    beside = (
        "the allocator's fragmentation is in it only where that decides the verdict (--reserved: in all)"
        if decides
        else ""
    )
    rate = f"{counted(report)} per second per GPU" if speed_shown else ""
    lines = [
        legend(PARTS if known else [_STATES], screen),
        wrap(
            f"{'; '.join(p for p in (f'{what}, in {sizes.unit}', beside, rate, 'host memory per node') if p)}.", screen
        ),
        *(wrap(f"warning: {warning}", screen, indent="  ") for warning in warnings(report)),
    ]
    if omitted := left_out(report):
        lines.append(wrap(f"Not in these figures: {omitted}.", screen, indent="  "))
    if known and not explained:
        example = next((e for e in report.estimates if e.fits), known)
        lines.append(wrap(f"What is needed at the peak, and when: --explain {row_name(example)}", screen))
    return "\n".join(lines)
