"""A stacked bar per strategy against a line at the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.render.parts import Part
from fsdp_advisor.render.scale import Scale, short, ticks
from fsdp_advisor.render.svg import (
    ACCENT,
    SMALL,
    bands,
    element,
    frame,
    legend,
    line,
    lines,
    number,
    polyline,
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
    tops = [top + row * i for i in range(len(bars))]
    above, high = (8, 22) if roomy else (24, 20)
    body += _segments(key, list(zip(bars, (y + above for y in tops), strict=True)), scale, high)
    for bar, y in zip(bars, tops, strict=True):
        body += _words_beside(bar, y, right + 6) if roomy else _words_above(bar, y, width)
    at = (right + 6, 28.5) if roomy else (0, 51.5)
    body += _marks([(bar, at[0], y + at[1]) for bar, y in zip(bars, tops, strict=True)])
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


def _segments(key: str, bars: Sequence[tuple[Bar, float]], scale: Scale, height: float) -> list[str]:
    """The bars themselves, each with its top. Parts' edges are rounded as sums, so that a bar is as long as its total."""
    boxes: dict[Part, list[tuple[float, float, float]]] = {}
    for bar, y in bars:
        done = 0
        for part, n_bytes in bar.parts:
            begin, done = done, done + n_bytes
            x, end = (round(scale(min(edge, scale.high)), 1) for edge in (begin, done))
            if end > x:
                boxes.setdefault(part, []).append((x, y, end - x))
    drawn = [bands(of, height, f"url(#{key}-{part.key})") for part, of in boxes.items()]
    torn = "".join(_torn(scale.end, y, height) for bar, y in bars if bar.total_bytes > scale.high)
    return [*drawn, element("path", d=torn, class_="paper-fill", fill="#ffffff")] if torn else drawn


def _torn(x: float, y: float, height: float) -> str:
    """A ragged end: the bar goes on."""
    step = height / 4
    points = [(x - 12 + (6 if i % 2 else 0), y - 1 + i * (step + 0.5)) for i in range(5)]
    return polyline([*points, *((a + 4, b) for a, b in reversed(points))]) + "z"


def _kind(bar: Bar) -> str:
    return {True: "good", False: "bad", None: "muted"}[bar.fits]


def _marks(bars: Sequence[tuple[Bar, float, float]]) -> list[str]:
    """Ticks and crosses before the verdicts, so that no colour is needed to tell them."""
    ticks_ = "".join(f"M{number(x)} {number(y)}l3 3.4 6-7" for bar, x, y in bars if bar.fits)
    crosses = "".join(f"M{number(x + 1)} {number(y - 3.5)}l7 7m0-7l-7 7" for bar, x, y in bars if bar.fits is False)
    drawn = [stroke(path, kind=kind, width=1.8) for path, kind in ((ticks_, "good"), (crosses, "bad")) if path]
    return drawn + [text(x + 2, y + 4, "?", kind="muted") for bar, x, y in bars if bar.fits is None]


def _total(bar: Bar) -> str:
    return format_gib(bar.total_bytes) if bar.complete else f"> {format_gib(bar.total_bytes)}"


def _words_beside(bar: Bar, y: float, x: float) -> list[str]:
    return [
        *([element("rect", x=0, y=y + 6, width=3, height=26, class_="f-accent", fill=ACCENT)] if bar.chosen else []),
        text(10, y + 18, bar.label, bold=bar.chosen),
        text(10, y + 33, bar.backend, kind="muted", size=SMALL),
        text(x, y + 18, _total(bar), bold=bar.chosen),
        text(x + 14, y + 33, bar.verdict, kind=_kind(bar), size=SMALL),
    ]


def _words_above(bar: Bar, y: float, width: float) -> list[str]:
    total = _total(bar)
    name = f"{bar.label} ({bar.backend})"
    room = width - width_of(total, bold=bar.chosen) - 8
    name = bar.label if width_of(name, bold=bar.chosen) > room else name
    name = wrapped(name, room)[0]
    return [
        text(0, y + 17, name, bold=bar.chosen),
        text(width, y + 17, total, anchor="end", bold=bar.chosen),
        text(14, y + 56, bar.verdict, kind=_kind(bar), size=SMALL),
    ]


def _told(bars: Sequence[Bar], gpu: str, capacity_bytes: int) -> str:
    rows = (
        f"{bar.label} ({bar.backend}), {bar.verdict}: {_total(bar)}, of which "
        + (", ".join(f"{part.name} {format_gib(n)}" for part, n in bar.parts if n >= GIB / 200) or "next to nothing")
        for bar in bars
    )
    return f"Against {gpu} with {format_gib(capacity_bytes)}. " + ". ".join(rows) + "."
