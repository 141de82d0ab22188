"""Tensor memory through one step, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.render.svg.elements import SMALL, frame, line, lines, number, stroke, text, wrapped
from fsdp_advisor.render.svg.scale import Scale, short, ticks
from fsdp_advisor.units import GIB, format_gib

Highs = Mapping[str, Sequence[int]]
"""By phase, the highest bytes of each section of the step."""


def two_timelines(predicted: Highs, measured: Highs, *, label: str, width: int = 720) -> str:
    """Each phase takes a third of the width, so that predictions and measurements may have different numbers of sections."""
    words = wrapped(label, width - 8, SMALL)
    top = 40 + 16 * len(words)
    bottom = top + 240
    highest = max((high for side in (predicted, measured) for highs in side.values() for high in highs), default=0)
    xs = Scale(0, len(PHASES), 48, width - 6)
    ys = Scale(0, max(highest, 1) * 1.08, bottom, top)
    marks = ticks(0, ys.high / GIB, 5)
    body = [text(4, 16 + 16 * i, row, size=SMALL, bold=True) for i, row in enumerate(words)]
    body += [lines((xs.start, ys(m * GIB), xs.end, ys(m * GIB)) for m in marks)]
    body += [text(xs.start - 6, ys(m * GIB) + 4, short(m), kind="muted", anchor="end", size=SMALL) for m in marks]
    body.append(text(4, top - 8, "GiB", kind="muted", size=SMALL))
    for i, phase in enumerate(PHASES):
        body.append(text((xs(i) + xs(i + 1)) / 2, bottom + 17, phase, kind="muted", anchor="middle", size=SMALL))
        if i:
            body.append(line(xs(i), top, xs(i), bottom, kind="muted", dash="2 3"))
    body += [
        stroke(_path(measured, xs, ys), kind="ink", width=2.4),
        stroke(_path(predicted, xs, ys), kind="bad", width=1.2, dash="5 3"),
        line(xs.end - 230, top - 12, xs.end - 206, top - 12, kind="ink", width=2.4),
        text(xs.end - 200, top - 8, "measured", kind="muted", size=SMALL),
        line(xs.end - 110, top - 12, xs.end - 86, top - 12, kind="bad", width=1.2, dash="5 3"),
        text(xs.end - 80, top - 8, "predicted", kind="muted", size=SMALL),
    ]
    description = "; ".join(
        f"{name} {format_gib(max(high for highs in side.values() for high in highs))}"
        for name, side in (("predicted", predicted), ("measured", measured))
        if any(side.values())
    )
    return frame(
        "both", f"Memory through one step: {label}", f"The peaks: {description or 'none'}.", width, bottom + 26, *body
    )


def _path(highs: Highs, xs: Scale, ys: Scale) -> str:
    """A horizontal line for each section, joined by vertical lines."""
    path = ""
    for i, phase in enumerate(PHASES):
        values = highs.get(phase, ())
        for j, high in enumerate(values):
            left, right = (xs(i + at / len(values)) for at in (j, j + 1))
            path += f"{'L' if path else 'M'}{number(left)} {number(ys(high))}H{number(right)}"
    return path or "M0 0"
