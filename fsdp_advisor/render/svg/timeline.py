"""Tensor memory through one training step, with the peak marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.render.svg.elements import (
    SMALL,
    element,
    frame,
    line,
    lines,
    number,
    polyline,
    stroke,
    text,
    width_of,
    wrapped,
)
from fsdp_advisor.render.svg.scale import Scale, short, ticks
from fsdp_advisor.units import GIB, format_gib

NARROWEST_SECTION = 4.0
"""Sections narrower than this number of pixels are merged, because their ups and downs could not be seen."""


def memory_timeline(
    sections: Sequence[TimelinePoint],
    *,
    label: str,
    capacity_bytes: int,
    kept_bytes: int = 0,
    width: int = 960,
    key: str = "step",
) -> str:
    """The step from left to right; all sections have the same width. `kept_bytes` stay between steps."""
    height, top, bottom = (300, 46, 268) if width >= 560 else (280, 46, 248)
    peak = max(sections, key=lambda m: m.high_bytes)
    at = sections.index(peak)
    highest = peak.high_bytes * 1.12
    near = capacity_bytes <= peak.high_bytes * 1.6
    if near:
        highest = max(highest, capacity_bytes * 1.06)
    left = 44.0
    xs = Scale(0, len(sections), left, width - 4)
    ys = Scale(0, highest, bottom, top)
    body = _ground(ys, left, width)
    phases = [(phase, len(list(group))) for phase, group in groupby(sections, key=lambda m: m.phase)]
    body += _phases(phases, xs, top, bottom)
    body.append(_area(sections, xs, ys))
    if kept_bytes:
        body.append(
            element(
                "rect", x=xs.start, y=ys(kept_bytes), width=xs.end - xs.start, height=bottom - ys(kept_bytes),
                class_="f-states", fill="#27507f", fill_opacity="0.9",
            )
        )  # fmt: skip
    if near:
        y = ys(capacity_bytes)
        body.append(line(left, y, width - 4, y, kind="ink", width=1.6))
        body.append(text(left + 4, y - 5, f"GPU: {format_gib(capacity_bytes)}", size=SMALL, bold=True))
    body += _peak(peak, xs(at + 0.5), ys(peak.high_bytes), width, top)
    body += _feet(kept_bytes, bottom, left, width)
    description = ", ".join(
        f"{phase} reaches {format_gib(max(m.high_bytes for m in sections if m.phase == phase))}"
        for phase in dict.fromkeys(m.phase for m in sections)
    )
    return frame(
        key,
        f"Memory through one step under {label}",
        f"{description}. The peak, {format_gib(peak.high_bytes)}, is in {peak.phase}, at {peak.where}.",
        width,
        height,
        *body,
    )


def _ground(ys: Scale, left: float, width: float) -> list[str]:
    marks = ticks(0, ys.high / GIB, 5)
    drawn = [lines((left, ys(m * GIB), width - 4, ys(m * GIB)) for m in marks)]
    for mark in marks:
        y = ys(mark * GIB)
        drawn.append(text(left - 6, y + 4, short(mark), kind="muted", anchor="end", size=SMALL))
    return [*drawn, text(left - 6, ys.end - 18, "GiB", kind="muted", anchor="end", size=SMALL)]


def _phases(phases: list[tuple[str, int]], xs: Scale, top: float, bottom: float) -> list[str]:
    drawn, at = [], 0
    for phase, n in phases:
        x, room = xs(at), xs(at + n) - xs(at)
        if at:
            drawn.append(line(x, top - 10, x, bottom, kind="muted", dash="2 3"))
        if width_of(phase, SMALL) + 8 <= room:
            drawn.append(text(x + 6, top - 14, phase, kind="muted", size=SMALL))
        elif at + n == xs.high:
            drawn.append(text(xs.end, top - 30, phase, kind="muted", anchor="end", size=SMALL))
        at += n
    return drawn


def _area(sections: Sequence[TimelinePoint], xs: Scale, ys: Scale) -> str:
    """The line of live bytes with the area below it."""
    points = _outline(sections, xs, ys)
    line_path = polyline(points)
    area = element(
        "path",
        d=f"{line_path}V{number(ys.start)}H{number(xs.start)}Z",
        class_="f-area",
        fill="#5b9bc9",
        fill_opacity="0.35",
    )
    return area + stroke(line_path, kind="accent", width=1.6)


def _outline(sections: Sequence[TimelinePoint], xs: Scale, ys: Scale) -> list[tuple[float, float]]:
    """The points of the line: each section's begin and its highest point. Narrow sections are merged."""
    points, live = [], min(sections[0].live_bytes, sections[0].high_bytes)
    merged = max(1, math.ceil(NARROWEST_SECTION * len(sections) / (xs.end - xs.start)))
    for begin in range(0, len(sections), merged):
        indices = range(begin, min(begin + merged, len(sections)))
        highest = max(indices, key=lambda i: sections[i].high_bytes)
        points += [(xs(begin), ys(live)), (xs(highest + 0.5), ys(sections[highest].high_bytes))]
        live = sections[indices[-1]].live_bytes
    points.append((xs(len(sections)), ys(live)))
    return points


def _peak(peak: TimelinePoint, x: float, y: float, width: float, top: float) -> list[str]:
    words = f"peak {format_gib(peak.high_bytes)}"
    left = x > width * 0.55
    at = max(y - 8, top - 2)
    return [
        line(x, y, x, at, kind="ink"),
        element("circle", cx=x, cy=y, r=4.5, class_="f-bad", fill="#b23c17"),
        text(x - 9 if left else x + 9, at + 2, words, anchor="end" if left else "start", bold=True),
    ]


def _feet(kept_bytes: int, bottom: float, left: float, width: float) -> list[str]:
    """Labels of the horizontal axis and of the solid band."""
    kept = f"solid: parameters and optimizer state, {format_gib(kept_bytes)}" if kept_bytes else ""
    axis = "one step, layer by layer"
    if width_of(axis + kept, SMALL) + 24 > width - left:
        lines = [kept] if kept else [axis]
        return [
            text(left, bottom + 17 + 15 * i, w, kind="muted", size=SMALL)
            for i, w in enumerate(wrapped(lines[0], width - left, SMALL))
        ]
    return [
        text(left, bottom + 17, kept, kind="muted", size=SMALL),
        text(width - 4, bottom + 17, f"{axis} →", kind="muted", anchor="end", size=SMALL),
    ]
