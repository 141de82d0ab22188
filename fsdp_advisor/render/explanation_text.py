"""The explanation of one row as text: the parts of its memory, and the timeline of its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.text import Text

from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.render.explanation import ExplanationView, share_text
from fsdp_advisor.render.parts import STATES
from fsdp_advisor.render.sizes import Sizes
from fsdp_advisor.render.terminal import Column, Screen, bar, draw, widths, wrap

BAR_WIDTHS = (10, 40)
"""Characters of the narrowest and of the widest bar in the timeline."""
RUN_ENDS = 3
"""Layers shown at each end of a run of layers in the timeline."""


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
    narrow, wide = BAR_WIDTHS
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
