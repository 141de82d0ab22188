"""A stacked bar per strategy against a line at the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.render.parts import MemoryPart
from fsdp_advisor.render.svg.elements import (
    ACCENT,
    SMALL,
    Fill,
    boxes,
    element,
    frame,
    legend,
    line,
    lines,
    polyline,
    stroke,
    text,
    width_of,
    wrapped,
)
from fsdp_advisor.render.svg.scale import Scale, short, ticks
from fsdp_advisor.units import GIB, format_gib

CUT_AT = 1.7
"""Bars are cut at this multiple of the GPU's memory, so that one large bar does not make the others unreadable."""
NARROW = 560
"""Below this width in pixels, texts stand above the bars instead of on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One strategy: the parts of what it needs in bytes, and its verdict. `fits` None: unknown."""

    label: str
    backend: str
    parts: tuple[tuple[MemoryPart, int], ...]
    verdict: str
    fits: bool | None
    chosen: bool = False
    complete: bool = True
    """False if the parts are a lower bound, because the peak is unknown."""

    @property
    def total_bytes(self) -> int:
        return sum(n for _, n in self.parts)


def stacked_bars(bars: Sequence[Bar], capacity_bytes: int, gpu: str, *, width: int = 960, key: str = "bars") -> str:
    """A bar per strategy, with a line at `capacity_bytes`. Longer bars are cut and labelled with their total."""
    used = list(dict.fromkeys(part for bar in bars for part, n in bar.parts if n))
    roomy = width >= NARROW
    names = [w for b in bars for w in (width_of(b.label, bold=b.chosen), width_of(b.backend, SMALL))]
    left = max(names, default=0) + 22 if roomy else 0.0
    verdicts = max((width_of(bar.verdict, SMALL) for bar in bars), default=0) + 34
    right = width - (min(max(172.0, verdicts), 240.0) if roomy else 0)
    top_bytes = min(max([*(bar.total_bytes for bar in bars), capacity_bytes * 1.05]), capacity_bytes * CUT_AT)
    scale = Scale(0, top_bytes, left, right - 10)
    fills = [Fill.of(part) for part in used]
    legend_svg, top = legend(key, fills, width, 0)
    top += 24
    row = 42 if roomy else 62
    bottom = top + row * len(bars)
    body = [legend_svg, *_axis(scale, top, bottom, "GiB" if roomy else "GiB per GPU")]
    tops = [top + row * i for i in range(len(bars))]
    above, high = (8, 22) if roomy else (24, 20)
    body += _segments(key, list(zip(bars, (y + above for y in tops), strict=True)), scale, high)
    for bar, y in zip(bars, tops, strict=True):
        body += _texts_at_sides(bar, y, right + 6, width) if roomy else _texts_above(bar, y, width)
    at = (right + 6, 28.5) if roomy else (0, 51.5)
    body += [_mark(bar, at[0], y + at[1]) for bar, y in zip(bars, tops, strict=True)]
    x = scale(capacity_bytes)
    body.append(line(x, top - 4, x, bottom, kind="ink", width=1.6))
    caption = f"{gpu}: {format_gib(capacity_bytes)}"
    half = width_of(caption, SMALL, bold=True) / 2
    body.append(text(min(max(x, half), width - half), top - 10, caption, anchor="middle", bold=True, size=SMALL))
    return frame(
        key,
        "Memory needed per GPU by strategy",
        _description(bars, gpu, capacity_bytes),
        width,
        bottom + 26,
        *body,
        fills=fills,
    )


def _axis(scale: Scale, top: float, bottom: float, unit: str) -> list[str]:
    marks = ticks(0, scale.high / GIB, 6 if scale.end - scale.start > 400 else 4)
    drawn = [lines((scale(m * GIB), top - 4, scale(m * GIB), bottom) for m in marks)]
    for mark in marks:
        x = scale(mark * GIB)
        label = f"{short(mark)} {unit}" if mark == marks[-1] else short(mark)
        anchor = "start" if mark == 0 else "end" if mark == marks[-1] and x > scale.end - 30 else "middle"
        drawn.append(text(x, bottom + 16, label, kind="muted", anchor=anchor, size=SMALL))
    return drawn


def _segments(key: str, bars: Sequence[tuple[Bar, float]], scale: Scale, height: float) -> list[str]:
    """The bars, each at its y. Running totals are rounded instead of single parts, so that a bar is as long as its total."""
    drawn = []
    for bar, y in bars:
        done = 0
        for part, n_bytes in bar.parts:
            begin, done = done, done + n_bytes
            left, right = (round(scale(min(edge, scale.high)), 1) for edge in (begin, done))
            if right > left:
                drawn.append(boxes([(left, y, right, y + height)], f"url(#{key}-{part.key})"))
        if done > scale.high:
            torn = _torn_edge(scale.end, y, height)
            drawn.append(element("path", d=torn, class_="paper-fill", fill="#ffffff"))
    return drawn


def _torn_edge(x: float, y: float, height: float) -> str:
    """A zigzag at the end of a bar that is cut."""
    step = height / 4
    points = [(x - 12 + (6 if i % 2 else 0), y - 1 + i * (step + 0.5)) for i in range(5)]
    return polyline([*points, *((a + 4, b) for a, b in reversed(points))]) + "Z"


def _kind(bar: Bar) -> str:
    return {True: "good", False: "bad", None: "muted"}[bar.fits]


def _mark(bar: Bar, x: float, y: float) -> str:
    """A tick, a cross or a question mark before the verdict, so that it can be read without colour."""
    if bar.fits is None:
        return text(x + 2, y + 4, "?", kind="muted")
    if bar.fits:
        return stroke(polyline([(x, y), (x + 3, y + 3.4), (x + 9, y - 3.6)]), kind="good", width=1.8)
    cross = polyline([(x + 1, y - 3.5), (x + 8, y + 3.5)]) + polyline([(x + 8, y - 3.5), (x + 1, y + 3.5)])
    return stroke(cross, kind="bad", width=1.8)


def _total(bar: Bar) -> str:
    return format_gib(bar.total_bytes) if bar.complete else f"> {format_gib(bar.total_bytes)}"


def _cut(verdict: str, width: float) -> str:
    """The verdict, cut to `width` pixels. The page's table has the whole text."""
    first, *rest = wrapped(verdict, width - 8, SMALL)
    return f"{first} …" if rest else first


def _texts_at_sides(bar: Bar, y: float, x: float, width: float) -> list[str]:
    return [
        *([element("rect", x=0, y=y + 6, width=3, height=26, class_="f-accent", fill=ACCENT)] if bar.chosen else []),
        text(10, y + 18, bar.label, bold=bar.chosen),
        text(10, y + 33, bar.backend, kind="muted", size=SMALL),
        text(x, y + 18, _total(bar), bold=bar.chosen),
        text(x + 14, y + 33, _cut(bar.verdict, width - x - 14), kind=_kind(bar), size=SMALL),
    ]


def _texts_above(bar: Bar, y: float, width: float) -> list[str]:
    total = _total(bar)
    name = f"{bar.label} ({bar.backend})"
    room = width - width_of(total, bold=bar.chosen) - 8
    name = bar.label if width_of(name, bold=bar.chosen) > room else name
    name = wrapped(name, room)[0]
    return [
        text(0, y + 17, name, bold=bar.chosen),
        text(width, y + 17, total, anchor="end", bold=bar.chosen, halo=True),
        text(14, y + 56, _cut(bar.verdict, width - 14), kind=_kind(bar), size=SMALL),
    ]


def _description(bars: Sequence[Bar], gpu: str, capacity_bytes: int) -> str:
    rows = (
        f"{bar.label} ({bar.backend}), {bar.verdict}: {_total(bar)}, of which "
        + (", ".join(f"{part.name} {format_gib(n)}" for part, n in bar.parts if n >= GIB / 200) or "less than 0.01 GiB")
        for bar in bars
    )
    return f"Against {gpu} with {format_gib(capacity_bytes)}. " + ". ".join(rows) + "."
