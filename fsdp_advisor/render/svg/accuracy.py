"""Predicted against measured, one point per record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.render.svg.elements import ACCENT, SMALL, element, frame, line, number, text
from fsdp_advisor.render.svg.scale import Scale, log_ticks, short
from fsdp_advisor.units import GIB

BAND = 0.05
"""The tinted band: predictions within 5 % of what was measured."""
_COLOURS = ("#27507f", "#c4502b", "#e3a52f", "#6d7681")
_KEYS = ("states", "loss", "activations", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """One record: both sides in bytes, and its group (mode and device)."""

    group: str
    measured_bytes: int
    predicted_bytes: int


def accuracy(points: Sequence[AccuracyPoint], *, width: int = 560) -> str:
    """Both axes in GiB, logarithmic; on the diagonal prediction and measurement agree."""
    points = [p for p in points if p.measured_bytes > 0 and p.predicted_bytes > 0]
    groups = list(dict.fromkeys(p.group for p in points))
    side = min(width, 520)
    left, top = 52.0, 28.0 + 20 * len(groups)
    values = [v / GIB for p in points for v in (p.measured_bytes, p.predicted_bytes)] or [1.0]
    low, high = min(values) / 1.3, max(values) * 1.3
    xs = Scale(low, high, left, side - 6, log=True)
    ys = Scale(low, high, top + side - left - 6, top, log=True)
    body = [_band(xs, ys, low, high), *_axes(xs, ys, low, high)]
    for i, group in enumerate(groups):
        colour, kind = _COLOURS[i % 4], _KEYS[i % 4]
        mine = [p for p in points if p.group == group]
        body += [_mark(i, xs(p.measured_bytes / GIB), ys(p.predicted_bytes / GIB), colour, kind) for p in mine]
        body += [
            _mark(i, 8, 12 + 20 * i, colour, kind),
            text(20, 16 + 20 * i, f"{group} ({len(mine)})", kind="muted", size=SMALL),
        ]
    worst = max((abs(p.predicted_bytes / p.measured_bytes - 1) for p in points), default=0.0)
    description = f"{len(points)} records; the largest error is {worst:.2%}." if points else "No records."
    return frame("accuracy", "Predicted against measured peaks", description, side, ys.start + 44, *body)


def _band(xs: Scale, ys: Scale, low: float, high: float) -> str:
    corners = [
        (low, low * (1 - BAND)), (high, high * (1 - BAND)), (high, high * (1 + BAND)), (low, low * (1 + BAND)),
    ]  # fmt: skip
    path = "".join(
        f"{'L' if i else 'M'}{number(xs(x))} {number(ys(min(max(y, low), high)))}" for i, (x, y) in enumerate(corners)
    )
    return element("path", d=path + "Z", class_="f-band", fill=ACCENT, fill_opacity="0.14") + line(
        xs(low), ys(low), xs(high), ys(high), kind="accent", width=1.2
    )


def _axes(xs: Scale, ys: Scale, low: float, high: float) -> list[str]:
    drawn = [
        line(xs.start, ys.start, xs.end, ys.start, kind="muted"),
        line(xs.start, ys.start, xs.start, ys.end, kind="muted"),
    ]
    marks = log_ticks(low, high)
    for mark in marks if len(marks) <= 7 else [m for m in marks if str(m).strip("0.")[:1] == "1"]:
        drawn += [
            text(xs(mark), ys.start + 17, short(mark), kind="muted", anchor="middle", size=SMALL),
            text(xs.start - 7, ys(mark) + 4, short(mark), kind="muted", anchor="end", size=SMALL),
        ]
    drawn.append(text(xs.end, ys.start + 36, "measured, GiB →", kind="muted", anchor="end", size=SMALL))
    drawn.append(text(2, ys.end - 10, "predicted, GiB", kind="muted", size=SMALL))
    return drawn


def _mark(group: int, x: float, y: float, colour: str, kind: str) -> str:
    """Draw a point. Each group has its own marker: disc, square, triangle or diamond."""
    shapes = ("", "M-4 -4H4V4H-4Z", "M0 -5L5 4H-5Z", "M0 -5L5 0L0 5L-5 0Z")
    if group % 4 == 0:
        return element("circle", cx=x, cy=y, r=4, class_=f"f-{kind}", fill=colour, fill_opacity="0.75")
    where = f"translate({number(x)} {number(y)})"
    return element("path", d=shapes[group % 4], transform=where, class_=f"f-{kind}", fill=colour, fill_opacity="0.75")
