"""A report as text: the job, a row per strategy, and what the columns and warnings mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.text import Text

from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.render.explanation import ExplanationView, share_text
from fsdp_advisor.render.parts import PARTS, STATES
from fsdp_advisor.render.sizes import UNKNOWN, Sizes
from fsdp_advisor.render.terminal import Column, Screen, bar, draw, fitting, legend, paint, widths, wrap
from fsdp_advisor.render.view import ReportView, RowView

BAR_WIDTHS = (8, 24)
"""Characters of the narrowest and of the widest bar in the table."""
EXPLAIN_BAR_WIDTHS = (10, 40)
RUN_ENDS = 3
"""Layers shown at each end of a run of layers in the timeline."""
VERDICT_WIDTH = 36
"""Longer verdicts take several lines."""
_STYLE = {True: "green", False: "red", None: "yellow"}


def text(view: ReportView, screen: Screen, explained: ExplanationView | None = None) -> str:
    """The whole answer, without a final newline."""
    table = fitting(_columns(view), screen.width - BAR_WIDTHS[0] - 2)
    fits = widths(table) + BAR_WIDTHS[0] + 2 <= screen.width
    body = _table(view, table, screen) if fits else _cards(view, screen)
    blocks = [wrap(view.job, screen), body, _notes(view, screen, hint=explained is None)]
    if explained is not None:
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
        columns += [
            Column(name, [row.state_texts[name] for row in rows], right=True, rank=2)
            for name in ("parameters", "gradients", "optimizer")
        ]
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


def _cards(view: ReportView, screen: Screen) -> str:
    """A few lines per row, for a screen that is too narrow for the table."""
    return "\n".join(_card(view, row, screen) for row in view.rows)


def _card(view: ReportView, row: RowView, screen: Screen) -> str:
    unit = view.sizes.unit
    if row.peak_known:
        items = [f"needs {row.needed_text} {unit}", f"states {row.states_text} {unit}"]
        made = f"at the peak: {'; '.join(f'{part.meaning} {view.sizes.bare(n)}' for part, n in row.parts)}"
    else:
        items = [f"states {row.states_text} {unit}"]
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
    """The legend, what the columns mean, warnings, and what is not modelled."""
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


def explanation_text(explained: ExplanationView, screen: Screen) -> str:
    """The explanation of one row, without a final newline."""
    blocks = [wrap(explained.heading, screen)]
    if explained.phases:
        blocks[0] += "\n" + wrap(explained.phases, screen, indent="  ")
        blocks.append(_components(explained, screen))
    blocks.append("\n".join(wrap(line, screen, indent="  ") for line in explained.lines))
    if explained.timeline:
        blocks.append(_timeline(explained, screen))
    return "\n\n".join(blocks)


def _components(explained: ExplanationView, screen: Screen) -> str:
    found, sizes = explained.components, explained.sizes
    return draw(
        [
            Column("needed at the peak", [*(c.name for c in found), "sum"]),
            Column(sizes.unit, [*(sizes.bare(c.n_bytes) for c in found), explained.total_text], right=True),
            Column("share", [*(share_text(c.share) for c in found), share_text(1)], right=True),
            Column("meaning", [*(c.meaning for c in found), ""]),
        ],
        screen,
    )


def _timeline(explained: ExplanationView, screen: Screen) -> str:
    """One line per section of the step. Equal micro-batches are shown once, and of a long run of layers only the first and the last
    ones.
    """
    points, sizes = explained.timeline, explained.sizes
    names = _numbered(points)
    rows = [row for micro_batch in _folded(points, sizes) for row in _rows(points, names, micro_batch)]
    columns = [
        Column("phase", [row.phase for row in rows]),
        Column("where", [row.where for row in rows]),
        Column("end", [sizes.bare(row.point.live_bytes) for row in rows], right=True),
        Column("highest", [sizes.bare(row.point.high_bytes) if row.whole else "" for row in rows], right=True),
    ]
    narrow, wide = EXPLAIN_BAR_WIDTHS
    room = screen.width - widths(columns) - 2
    if room >= narrow:
        width, whole = min(room, wide), explained.gpu_memory_bytes
        bars = [bar([(STATES, row.point.high_bytes)], whole, width, screen) if row.whole else Text("") for row in rows]
        columns.append(Column("of the GPU", bars))
    caption = f"Tensors through the step, in {sizes.unit}: at the end of each section, and the highest within it."
    return wrap(caption, screen) + "\n" + draw(columns, screen)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the timeline. If it is not `whole`, it represents several sections, of which `point` is the last."""

    phase: str
    where: str
    point: TimelinePoint
    whole: bool = True


def _numbered(points: Sequence[TimelinePoint]) -> list[str]:
    """The name of each point's place. Layers have the numbers that they have in the model, so they count down in backward."""
    names: list[str] = []
    for (phase, where), run in groupby(points, key=lambda point: (point.phase, point.where)):
        count = len(list(run))
        numbers = range(count, 0, -1) if phase == "backward" else range(1, count + 1)
        names += [where] if count == 1 else [f"{where} {number}" for number in numbers]
    return names


def _folded(points: Sequence[TimelinePoint], sizes: Sizes) -> Iterator[tuple[range, bool]]:
    """(points of a micro-batch or of the optimizer step, whether more micro-batches equal it)."""
    phases = [point.phase for point in points]
    starts = [i for i in range(1, len(phases)) if phases[i] != phases[i - 1] and phases[i] != "backward"]

    def looks(block: range) -> list[tuple[str, str, str, str]]:
        shown = (points[i] for i in block)
        return [(p.phase, p.where, sizes.bare(p.live_bytes), sizes.bare(p.high_bytes)) for p in shown]

    for _, equal in groupby((range(a, b) for a, b in pairwise([0, *starts, len(points)])), key=looks):
        first, *others = equal
        yield first, bool(others)


def _rows(points: Sequence[TimelinePoint], names: Sequence[str], micro_batch: tuple[range, bool]) -> Iterator[_Row]:
    """The lines of one micro-batch, or of the optimizer step."""
    block, more = micro_batch
    shown = [points[i] for i in block]
    phase = None
    for at in _shortened(shown):
        last = at if isinstance(at, int) else at.stop - 1
        point = shown[last]
        where = names[block.start + at] if isinstance(at, int) else f"  x {len(at)} more"
        yield _Row(point.phase if point.phase != phase else "", where, point, isinstance(at, int))
        phase = point.phase
    if more:
        yield _Row("", "  the same in each further micro-batch", shown[-1], whole=False)


def _shortened(points: Sequence[TimelinePoint]) -> list[int | range]:
    """Indices of the points to show, and ranges of indices to leave out in the middle of a run at the same place.

    The peak of the step is always shown.
    """
    peak = max(range(len(points)), key=lambda i: points[i].high_bytes)
    shown: list[int | range] = []
    for _, run in groupby(range(len(points)), key=lambda i: (points[i].phase, points[i].where)):
        indices = list(run)
        head, middle, tail = indices[:RUN_ENDS], indices[RUN_ENDS:-RUN_ENDS], indices[-RUN_ENDS:]
        if len(middle) < 2 or peak in middle:
            shown += indices
        else:
            shown += [*head, range(middle[0], middle[-1] + 1), *tail]
    return shown
