"""Errors of the predicted step time against the size of the job: parameters, GPUs, tokens per sequence."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.render.parts import OVERHEAD
from fsdp_advisor.render.svg.elements import (
    ACCENT,
    MUTED,
    PAPER,
    SMALL,
    Fill,
    clean,
    element,
    frame,
    legend,
    line,
    lines,
    text,
    width_of,
    wrapped,
)
from fsdp_advisor.render.svg.scale import Scale, power_ticks

BANDS = (30, 15)
"""The widths of the tinted bands, in percent of error."""
BEYOND = 5.0
"""The axes end at this multiple of the largest run."""
_ROOM = 72.0
"""Pixels reserved for the label of a tick."""
_RADIUS = 4.0
_APART, _ASIDE = 7.0, 14
"""Least distance of two marks in pixels, and the most that a mark is moved for it."""
_UNSEEN = Fill(
    key="unseen",
    name="larger than every published run",
    colour=OVERHEAD.colour,
    weave=OVERHEAD.weave,
    css=OVERHEAD.key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPoint:
    """One run: its error (predicted / measured - 1), and the caveats of its estimate.

    `judges`: no constant was chosen on its source.
    """

    label: str
    error_percent: float
    judges: bool
    caveats: tuple[str, ...]
    parameters: int
    gpus: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class _Axis:
    """The horizontal axis of a panel; ticks are powers of `base`."""

    name: str
    base: int
    value: Callable[[ErrorPoint], int]
    written: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value / 1e9:g}B" if value >= 1e9 else f"{value / 1e6:g}M" if value >= 1e6 else f"{value:,g}"


_AXES = (
    _Axis("parameters", 10, lambda point: point.parameters, _count),
    _Axis("GPUs", 2, lambda point: point.gpus, lambda value: f"{value:,.0f}"),
    _Axis("tokens per sequence", 2, lambda point: point.seq_len, lambda value: f"{value:,.0f}"),
)


def speed_errors(points: Sequence[ErrorPoint], *, width: int = 960, key: str = "speed-errors") -> str:
    """Three panels with the same errors, side by side, or below each other if `width` is small.

    A negative error means that the run took longer than predicted. Marks that would overlap are moved apart.
    """
    across = len(_AXES) if width >= 760 else 1
    left, gap, high = 40.0, 22.0, 250.0 if across > 1 else 190.0
    body, top = _key(points, key, width)
    errors = [point.error_percent for point in points]
    least, most = min([-45.0, *(1.08 * e for e in errors)]), max([45.0, *(1.08 * e for e in errors)])
    wide = (width - left - 6 - gap * (across - 1)) / across
    for i, axis in enumerate(_AXES):
        column, row = i % across, i // across
        start = left + column * (wide + gap)
        above = top + 22 + row * (high + 62)
        ys = Scale(least, most, above + high, above)
        body += _panel(axis, points, ys, start, start + wide, key, labelled=column == 0)
    bottom = top + 22 + (len(_AXES) // across) * (high + 62) - 14
    return frame(
        key,
        "Error of the step time against the size of the job",
        _description(points),
        width,
        bottom,
        *body,
        fills=[_UNSEEN],
    )


def _panel(
    axis: _Axis, points: Sequence[ErrorPoint], ys: Scale, start: float, end: float, key: str, *, labelled: bool
) -> list[str]:
    values = [axis.value(point) for point in points] or [1, 2]
    xs = Scale(min(values) / 1.5, max(values) * BEYOND, start, end, log=True)
    drawn = [_band(xs, ys, band) for band in BANDS]
    edge = xs(max(values))
    hatch = {"fill": f"url(#{key}-unseen)", "fill_opacity": "0.45"}
    drawn.append(element("rect", x=edge, y=ys.end, width=end - edge, height=ys.start - ys.end, **hatch))
    marks = [m for m in range(-990, 991, 30) if ys.low <= m <= ys.high] + [-15, 15]
    drawn.append(lines((start, ys(m), end, ys(m)) for m in marks if m))
    drawn.append(line(start, ys(0), end, ys(0), kind="muted"))
    if labelled:
        drawn += [
            text(start - 6, ys(m) + 4, f"{m:+d}" if m else "0", kind="muted", size=SMALL, anchor="end") for m in marks
        ]
        drawn.append(text(2, ys.end - 8, "error, % (below 0: the run was slower)", kind="muted", size=SMALL))
    for mark in power_ticks(xs.low, xs.high, axis.base, most=max(2, int((end - start) / _ROOM))):
        words = axis.written(mark)
        half = width_of(words, SMALL) / 2
        at = min(max(xs(mark), start + half), end - half)
        drawn.append(text(at, ys.start + 16, words, kind="muted", size=SMALL, anchor="middle"))
    drawn.append(text(end, ys.start + 34, f"{axis.name} →", kind="muted", size=SMALL, anchor="end"))
    places = _spread_out([(xs(axis.value(point)), ys(point.error_percent)) for point in points], start, end)
    for point, (x, y) in zip(points, places, strict=True):
        drawn.append(_mark(x, y, point.judges, bool(point.caveats), point.label))
    return drawn


def _spread_out(places: Sequence[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """The places moved along x as little as possible, at most _ASIDE, so that none covers another."""
    taken: list[tuple[float, float]] = []
    for x, y in places:
        steps = sorted(range(-_ASIDE, _ASIDE + 1), key=lambda d: (abs(d), d))
        free = (
            x + d for d in steps
            if start <= x + d <= end and all((x + d - a) ** 2 + (y - b) ** 2 >= _APART**2 for a, b in taken)
        )  # fmt: skip
        taken.append((next(free, x), y))
    return taken


def _band(xs: Scale, ys: Scale, percent: int) -> str:
    top, bottom = ys(percent), ys(-percent)
    return element(
        "rect", x=xs.start, y=top, width=xs.end - xs.start, height=bottom - top, class_="f-band", fill=ACCENT, fill_opacity="0.09"
    )  # fmt: skip


def _mark(x: float, y: float, judges: bool, warned: bool, label: str = "") -> str:
    """A disc if the run judges the model, a square if constants were chosen on its source; hollow if its estimate warns."""
    kind, colour = ("accent", ACCENT) if judges else ("muted", MUTED)
    looks: dict[str, Any] = {"class_": f"f-{kind} halo", "fill": colour, "stroke": PAPER}
    if warned:
        looks = {"class_": f"paper-fill l-{kind}", "fill": PAPER, "stroke": colour, "stroke_width": 1.5}
    r = _RADIUS if warned else _RADIUS + 0.6  # a light edge around filled marks
    description = [element("title", clean(label) or " ")] if label else []
    if judges:
        return element("circle", *description, cx=x, cy=y, r=r, **looks)
    return element("rect", *description, x=x - 0.9 * r, y=y - 0.9 * r, width=1.8 * r, height=1.8 * r, **looks)


def _key(points: Sequence[ErrorPoint], key: str, width: float) -> tuple[list[str], float]:
    """The legend of the marks, and the y below it."""
    judged = sum(point.judges for point in points)
    caveats = Counter(caveat for point in points for caveat in point.caveats)
    rows = (
        (True, False, f"judges the model: no constant was chosen on its source ({judged})"),
        (False, False, f"constants of the model were chosen on its source ({len(points) - judged})"),
        (True, True, "hollow: the estimate warns of "
         + (", ".join(f"{about} ({n})" for about, n in caveats.most_common()) or "nothing")),
    )  # fmt: skip
    drawn, y = [], 12.0
    for judges, warned, words in rows:
        drawn.append(_mark(8, y - 4, judges, warned))
        if warned:
            drawn.append(_mark(20, y - 4, False, warned))
        indent = 32 if warned else 20
        for words_line in wrapped(words, width - indent - 4):
            drawn.append(text(indent, y, words_line, kind="muted"))
            y += 17
        y += 3
    swatch, y = legend(key, [_UNSEEN], width, y - 9, 2)
    return [*drawn, swatch], y


def _description(points: Sequence[ErrorPoint]) -> str:
    """The description of the drawing."""
    if not points:
        return "No runs."
    judged = [abs(point.error_percent) for point in points if point.judges]
    description = f"{len(points)} published runs, of which {len(judged)} judge the model"
    if judged:
        within = ", ".join(f"{sum(e <= band for e in judged)} within {band} %" for band in sorted(BANDS))
        description += f": their median error is {statistics.median(judged):.1f} %, {within}"
    missed = [point for point in points if abs(point.error_percent) > max(BANDS)]
    warned = sum(bool(point.caveats) for point in missed)
    largest = ", ".join(f"{max(map(axis.value, points)):,} {axis.name}" for axis in _AXES)
    return (
        f"{description}. Of all, {len(missed)} are off by more than {max(BANDS)} %, and the estimate itself warns of {warned} of these. "
        f"The largest runs: {largest}."
    )
