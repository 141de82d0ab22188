"""A chart of one step's compute and communication over time, one lane each."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.svg.elements import SMALL, Fill, boxes, frame, legend, lines, text, width_of
from fsdp_advisor.render.svg.scale import Scale, short, ticks
from fsdp_advisor.timing import Interval

PIXEL = 1.0
"""The narrowest box in pixels. Operations within one pixel share a box."""
BOX_HEIGHT, LANE_HEIGHT = 22.0, 34.0


def _fills(kinds: Sequence[str]) -> dict[str, Fill]:
    """A fill for each kind. Colours repeat after len(PARTS) kinds, each time with other patterns, so that 36 kinds differ."""
    count = len(PARTS)
    return {
        kind: Fill(
            key=PARTS[i % count].key + (f"-{i // count}" if i >= count else ""),
            name=kind,
            colour=PARTS[i % count].colour,
            weave=PARTS[(i + i // count) % count].weave,
            css=PARTS[i % count].key,
        )
        for i, kind in enumerate(kinds)
    }


def stream_timeline(spans: Sequence[Interval], *, label: str, width: int = 960) -> str:
    """A lane per stream, in the order of their first spans. A gap is time in which a stream waits.

    There is only one layout. If it is wider than the page, it scrolls.
    """
    lanes = list(dict.fromkeys(s.stream for s in spans))
    spans = [s for s in spans if s.end_seconds > s.begin_seconds]
    kinds = list(dict.fromkeys(_kind(s) for s in spans))
    fills = _fills(kinds)
    end_s = max((s.end_seconds for s in spans), default=1.0) or 1.0
    left = min(max((width_of(lane) for lane in lanes), default=0.0) + 14, width / 2)
    xs = Scale(0, end_s, left, width - 4)
    legend_svg, top = legend("streams", list(fills.values()), width, 0)
    bottom = top + 8 + LANE_HEIGHT * len(lanes)
    body = [legend_svg, *_axis(xs, top, bottom)]
    for i, lane in enumerate(lanes):
        y = top + 12 + LANE_HEIGHT * i
        body.append(text(0, y + 17, lane))
        drawn = _boxes([s for s in spans if s.stream == lane], xs)
        for kind in kinds:
            edges = [(left, y + 2, right, y + 2 + BOX_HEIGHT) for k, left, right in drawn if k == kind]
            if edges:
                body.append(boxes(edges, f"url(#streams-{fills[kind].key})"))
    description = "; ".join(
        f"{lane}: busy {1e3 * sum(s.end_seconds - s.begin_seconds for s in spans if s.stream == lane):,.1f} ms"
        for lane in lanes
    )
    return frame(
        "streams",
        f"Compute and communication of one step under {label}",
        f"The step takes {1e3 * end_s:,.1f} ms. {description}.",
        width,
        bottom + 24,
        *body,
        fills=list(fills.values()),
    )


def _axis(xs: Scale, top: float, bottom: float) -> list[str]:
    marks = ticks(0, xs.high * 1e3, 6 if xs.end - xs.start > 400 else 4)
    drawn = [lines((xs(m / 1e3), top + 4, xs(m / 1e3), bottom) for m in marks)]
    for mark in marks:
        x = xs(mark / 1e3)
        label = f"{short(mark)} ms" if mark == marks[-1] else short(mark)
        anchor = "start" if mark == 0 else "end" if x > xs.end - 20 else "middle"
        drawn.append(text(x, bottom + 16, label, kind="muted", anchor=anchor, size=SMALL))
    return drawn


def _boxes(spans: Sequence[Interval], xs: Scale) -> list[tuple[str, float, float]]:
    """(kind, left, right) of a lane's boxes. A box of several short operations has the kind that takes most of its time."""
    columns: list[tuple[float, float, dict[str, float]]] = []
    for span in sorted(spans, key=lambda s: s.begin_seconds):
        left, right, seconds = xs(span.begin_seconds), xs(span.end_seconds), span.end_seconds - span.begin_seconds
        if columns and max(right, columns[-1][1]) <= columns[-1][0] + PIXEL:
            kinds = columns[-1][2]
            kinds[_kind(span)] = kinds.get(_kind(span), 0.0) + seconds
        else:
            columns.append((left, max(right, left + PIXEL), {_kind(span): seconds}))
    out: list[tuple[str, float, float]] = []
    for left, right, kinds in columns:
        kind = max(kinds, key=kinds.__getitem__)
        if out and out[-1][0] == kind and left - out[-1][2] < PIXEL / 2:
            out[-1] = (kind, out[-1][1], max(out[-1][2], right))
        else:
            out.append((kind, left, right))
    return out


def _kind(span: Interval) -> str:
    """The kind of an operation: `forward layers.3` is `forward`."""
    word, _, rest = span.name.partition(" ")
    if word == "reduce":
        return "reduce-scatter"
    return span.name if word in ("optimizer", "parameters") else word if rest else span.name
