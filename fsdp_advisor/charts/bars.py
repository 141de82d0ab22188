"""A stacked bar per strategy against a line at the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.charts.parts import Part
from fsdp_advisor.charts.scale import Scale, short, ticks
from fsdp_advisor.charts.svg import (
    ACCENT,
    SMALL,
    element,
    frame,
    legend,
    line,
    lines,
    number,
    stroke,
    text,
    width_of,
    wrapped,
)
from fsdp_advisor.units import GIB, format_gib

LONGEST = 1.7
"""Where a bar is cut, in GPUs' memories: one hopeless strategy shall not make all the others small."""
NARROW = 560


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One strategy: what its peak is made of, in bytes, and what is said of it. `fits` None: nothing known decides it."""

    label: str
    backend: str
    parts: tuple[tuple[Part, int], ...]
    verdict: str
    fits: bool | None
    chosen: bool = False
    complete: bool = True
    """False where the parts are a lower bound, not a peak."""

    @property
    def total_bytes(self) -> int:
        return sum(n for _, n in self.parts)


def stacked_bars(bars: Sequence[Bar], capacity_bytes: int, gpu: str, *, width: int = 960, key: str = "bars") -> str:
    """The bars from left to right, the line at `capacity_bytes`; bars far past it are cut, and say their total."""
    used = list(dict.fromkeys(part for bar in bars for part, n in bar.parts if n))
    roomy = width >= NARROW
    left = 2 + max((width_of(bar.label, bold=bar.chosen) for bar in bars), default=0) + 12 if roomy else 0.0
    right = width - (172 if roomy else 0)
    top_bytes = min(max([*(bar.total_bytes for bar in bars), capacity_bytes * 1.05]), capacity_bytes * LONGEST)
    scale = Scale(0, top_bytes, left, right - 10)
    legend_svg, top = legend(key, used, width, 0)
    top += 24
    row = 42 if roomy else 62
    bottom = top + row * len(bars)
    body = [legend_svg, *_axis(scale, top, bottom, "GiB" if roomy else "GiB per GPU")]
    for number_, bar in enumerate(bars):
        y = top + row * number_
        drawn = _segments(key, bar, scale, y + (8 if roomy else 24), 22 if roomy else 20)
        body += _words_beside(bar, drawn, y, right + 6) if roomy else _words_above(bar, drawn, y, width)
    x = scale(capacity_bytes)
    body.append(line(x, top - 4, x, bottom, kind="ink", width=1.6))
    caption = f"{gpu}: {format_gib(capacity_bytes)}"
    half = width_of(caption, SMALL, bold=True) / 2
    body.append(text(min(max(x, half), width - half), top - 10, caption, anchor="middle", bold=True, size=SMALL))
    return frame(
        key,
        "Peak memory per GPU by strategy",
        _told(bars, gpu, capacity_bytes),
        width,
        bottom + 26,
        *body,
        parts=used,
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


def _segments(key: str, bar: Bar, scale: Scale, y: float, height: float) -> str:
    """The bar itself; its parts' edges are rounded as sums, so that its length is that of the total."""
    drawn, done = [], 0
    for part, n_bytes in bar.parts:
        begin, done = done, done + n_bytes
        x, end = scale(min(begin, scale.high)), scale(min(done, scale.high))
        if end - x >= 0.05:
            drawn.append(element("rect", x=x, y=y, width=end - x, height=height, fill=f"url(#{key}-{part.key})"))
    if done > scale.high:
        drawn.append(_torn(scale.end, y, height))
    return "".join(drawn)


def _torn(x: float, y: float, height: float) -> str:
    """A ragged end: the bar goes on."""
    step = height / 4
    points = [(x - 12 + (6 if i % 2 else 0), y - 1 + i * (step + 0.5)) for i in range(5)]
    path = "".join(f"{'L' if i else 'M'}{number(a)} {number(b)}" for i, (a, b) in enumerate(points))
    back = "".join(f"L{number(a + 4)} {number(b)}" for a, b in reversed(points))
    return element("path", d=path + back + "Z", class_="paper-fill", fill="#ffffff")


def _kind(bar: Bar) -> str:
    return {True: "good", False: "bad", None: "muted"}[bar.fits]


def _mark(bar: Bar, x: float, y: float) -> str:
    """A tick or a cross before the verdict, so that no colour is needed to tell them."""
    if bar.fits is None:
        return text(x + 2, y + 4, "?", kind="muted")
    shape = f"M{number(x)} {number(y)}l3 3.4l6 -7" if bar.fits else f"M{number(x + 1)} {number(y - 3.5)}l7 7m0 -7l-7 7"
    return stroke(shape, kind="good" if bar.fits else "bad", width=1.8)


def _total(bar: Bar) -> str:
    return format_gib(bar.total_bytes) if bar.complete else f"> {format_gib(bar.total_bytes)}"


def _words_beside(bar: Bar, drawn: str, y: float, x: float) -> list[str]:
    return [
        *([element("rect", x=0, y=y + 6, width=3, height=26, class_="f-accent", fill=ACCENT)] if bar.chosen else []),
        text(10, y + 18, bar.label, bold=bar.chosen),
        text(10, y + 33, bar.backend, kind="muted", size=SMALL),
        drawn,
        text(x, y + 18, _total(bar), bold=bar.chosen),
        _mark(bar, x, y + 28.5),
        text(x + 14, y + 33, bar.verdict, kind=_kind(bar), size=SMALL),
    ]


def _words_above(bar: Bar, drawn: str, y: float, width: float) -> list[str]:
    total = _total(bar)
    name = f"{bar.label} ({bar.backend})"
    room = width - width_of(total, bold=bar.chosen) - 8
    name = bar.label if width_of(name, bold=bar.chosen) > room else name
    name = wrapped(name, room)[0]
    return [
        text(0, y + 17, name, bold=bar.chosen),
        text(width, y + 17, total, anchor="end", bold=bar.chosen),
        drawn,
        _mark(bar, 0, y + 51.5),
        text(14, y + 56, bar.verdict, kind=_kind(bar), size=SMALL),
    ]


def _told(bars: Sequence[Bar], gpu: str, capacity_bytes: int) -> str:
    rows = (
        f"{bar.label} ({bar.backend}), {bar.verdict}: {_total(bar)}, of which "
        + (", ".join(f"{part.name} {format_gib(n)}" for part, n in bar.parts if n) or "nothing")
        for bar in bars
    )
    return f"Against {gpu} with {format_gib(capacity_bytes)}. " + ". ".join(rows) + "."
