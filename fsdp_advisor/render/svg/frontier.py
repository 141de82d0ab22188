"""A chart of memory against throughput with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.render.svg.elements import (
    ACCENT,
    PAPER,
    SMALL,
    clean,
    element,
    frame,
    line,
    lines,
    number,
    text,
    width_of,
)
from fsdp_advisor.render.svg.scale import Scale, short, ticks
from fsdp_advisor.units import GIB, format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One configuration. `fits` None: unknown."""

    label: str
    memory_bytes: int
    throughput: float
    fits: bool | None = True
    chosen: bool = False


def best(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """The Pareto front: points that no other point beats in both memory and throughput, from the smallest to the fastest.

    >>> p = [FrontierPoint(label=n, memory_bytes=m, throughput=s) for n, m, s in
    ...      (("a", 10, 5.0), ("b", 20, 4.0), ("c", 30, 9.0))]
    >>> [q.label for q in best(p)]
    ['a', 'c']
    """
    out: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, -p.throughput)):
        if not out or point.throughput > out[-1].throughput:
            out.append(point)
    return out


def frontier(
    points: Sequence[FrontierPoint],
    *,
    capacity_bytes: int | None = None,
    unit: str = "tokens/s",
    width: int = 760,
    key: str = "frontier",
) -> str:
    """Memory to the right, throughput in `unit` upwards. Steps join the Pareto front; a line marks the GPU's memory."""
    height, left, top, bottom = 390, 66.0, 46.0, 342.0
    most_bytes = max([p.memory_bytes for p in points] + ([capacity_bytes] if capacity_bytes else [GIB]))
    if capacity_bytes:
        most_bytes = min(most_bytes, 2 * capacity_bytes)
    fastest = max([p.throughput for p in points], default=1.0) or 1.0
    least_bytes = min((p.memory_bytes for p in points), default=0)
    low = 0.0 if least_bytes < 0.4 * most_bytes else least_bytes - 0.6 * (most_bytes - least_bytes)
    xs = Scale(max(low, 0.0), most_bytes + 0.06 * (most_bytes - max(low, 0.0)), left, width - 8)
    ys = Scale(0, fastest * 1.16, bottom, top)
    shown = [p for p in points if p.memory_bytes <= xs.high]
    body = _axes(xs, ys, height, unit)
    if capacity_bytes:
        x = xs(capacity_bytes)
        body.append(line(x, top - 8, x, bottom, kind="ink", width=1.6))
        caption = f"GPU: {format_gib(capacity_bytes)}"
        body.append(
            text(
                min(x, width - width_of(caption, SMALL, bold=True) / 2),
                top - 13,
                caption,
                anchor="middle",
                size=SMALL,
                bold=True,
            )
        )
    edge = best(shown)
    if edge:
        path = f"M{number(xs(edge[0].memory_bytes))} {number(ys(edge[0].throughput))}" + "".join(
            f"H{number(xs(p.memory_bytes))}V{number(ys(p.throughput))}" for p in edge[1:]
        )
        body.append(element("path", d=path, class_="l-accent", stroke=ACCENT, stroke_width=1.6, fill="none"))
    body += [_dot(p, xs(p.memory_bytes), ys(p.throughput), unit) for p in shown]
    body += _labels(shown, edge, xs, ys, xs(capacity_bytes) if capacity_bytes else width)
    return frame(
        key,
        "Memory against throughput",
        _description(points, edge, capacity_bytes, unit),
        width,
        height,
        *body,
    )


def _axes(xs: Scale, ys: Scale, height: float, unit: str) -> list[str]:
    up, along = ticks(0, ys.high, 5), ticks(xs.low / GIB, xs.high / GIB, 6 if xs.end > 500 else 4)
    drawn = [lines((xs.start, ys(m), xs.end, ys(m)) for m in up)]
    drawn += [text(xs.start - 8, ys(m) + 4, short(m), kind="muted", anchor="end", size=SMALL) for m in up]
    drawn += [text(xs(m * GIB), ys.start + 18, short(m), kind="muted", anchor="middle", size=SMALL) for m in along]
    drawn.append(text(xs.end, height - 8, "needed per GPU, GiB →", kind="muted", anchor="end", size=SMALL))
    drawn.append(text(2, 14, f"{unit} per GPU", kind="muted", size=SMALL))
    return drawn


def _dot(point: FrontierPoint, x: float, y: float, unit: str) -> str:
    """A disc if the point fits, else a ring, so that the chart can be read without colour. Its title names points without a label."""
    kind, colour = ("accent", ACCENT) if point.fits else ("muted", "#57606c")
    said = f"{point.label}: {format_gib(point.memory_bytes)}, {point.throughput:,.0f} {unit}"
    ring = element(
        "circle", element("title", clean(said)), cx=x, cy=y, r=7 if point.chosen else 5,
        class_=f"f-{kind}" if point.fits else "ring", fill=colour if point.fits else PAPER,
        stroke=None if point.fits else colour, stroke_width=None if point.fits else 1.6,
    )  # fmt: skip
    halo = element("circle", cx=x, cy=y, r=11, class_="l-accent", stroke=ACCENT, stroke_width=1.4, fill="none")
    return ring + (halo if point.chosen else "")


def _labels(points: Sequence[FrontierPoint], edge: Sequence[FrontierPoint], xs: Scale, ys: Scale, width: float) -> list[str]:  # fmt: skip
    """Labels that cover no other label or point and end before `width`. The chosen point and the Pareto front come first."""
    taken: list[tuple[float, float, float, float]] = [
        (xs(p.memory_bytes) - 6, ys(p.throughput) - 6, xs(p.memory_bytes) + 6, ys(p.throughput) + 6) for p in points
    ]
    drawn = []
    for point in sorted(points, key=lambda p: (not p.chosen, p not in edge, -p.throughput)):
        x, y, wide = (
            xs(point.memory_bytes),
            ys(point.throughput),
            width_of(point.label, SMALL, bold=point.chosen),
        )
        places = [
            (x + 11, y + 17),
            (x - 13 - wide, y + 4),
            (x + 13, y + 4),
            (x - wide / 2, y - 13),
            (x - wide / 2, y + 26),
        ]
        if point.chosen:  # always labelled: above its ring, moved sideways into the drawing
            places.append((min(max(x - wide / 2, xs.start + 2), width - wide - 2), y - 17))
        for a, b in places:
            box = (a - 2, b - 11, a + wide + 2, b + 3)
            inside = box[0] >= xs.start and box[2] <= width and box[1] >= 34
            last = point.chosen and (a, b) == places[-1]
            if last or (inside and not any(_overlap(box, other) for other in taken)):
                taken.append(box)
                drawn.append(text(a, b, point.label, size=SMALL, bold=point.chosen, halo=True))
                break
    return drawn


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _description(
    points: Sequence[FrontierPoint], edge: Sequence[FrontierPoint], capacity_bytes: int | None, unit: str
) -> str:
    if not points:
        return "No configurations."
    names = "; ".join(f"{p.label}: {format_gib(p.memory_bytes)}, {p.throughput:,.0f} {unit}" for p in edge)
    against = f" The GPU has {format_gib(capacity_bytes)}." if capacity_bytes else ""
    return f"{len(points)} configurations; the Pareto front: {names}.{against}"
