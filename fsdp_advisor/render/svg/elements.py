"""SVG elements for the charts: shapes, text, pattern fills, legends and the frame around a drawing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fsdp_advisor.render.parts import MemoryPart

INK, MUTED, LINE, PAPER = "#1b2129", "#57606c", "#dfe3e8", "#ffffff"
ACCENT, GOOD, BAD = "#2b5f9e", "#0b6e55", "#b23c17"
"""Colours on light paper. A page overrides them by the classes of the shapes."""

SMALL, NORMAL = 12.0, 13.0
"""Font sizes in pixels."""
_EM = 0.56
"""Mean width of a character of a system font in ems, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A colour with a pattern on top, so that it can be told apart without colour.

    `weave` is a path within 8 x 8 pixels. `css` names the class by which a page sets the colour.
    """

    key: str
    name: str
    colour: str
    weave: str
    css: str

    @classmethod
    def of(cls, part: MemoryPart) -> Fill:
        return cls(key=part.key, name=part.meaning, colour=part.colour, weave=part.weave, css=part.key)


def number(value: float) -> str:
    """A coordinate with at most one decimal.

    >>> number(12.04), number(3.25), number(-0.01)
    ('12', '3.2', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def clean(words: str) -> str:
    """Text for XML: escaped, and without control and direction characters, which could break or disguise it.

    >>> clean("<b>&\\x00\\u202e")
    '&lt;b&gt;&amp;'
    """
    return escape("".join(c for c in words if c.isprintable()))


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """One element. `class_` is written class, `stroke_width` stroke-width; children are SVG already.

    >>> element("rect", x=1.0, class_="a b", fill=None)
    '<rect x="1" class="a b"/>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, (int, float)) else clean(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def text(
    x: float,
    y: float,
    words: str,
    *,
    kind: str = "ink",
    anchor: str = "start",
    size: float = NORMAL,
    bold: bool = False,
    halo: bool = False,
) -> str:
    """A line of text on its baseline, in the colour of `kind`. A `halo` is a light edge that covers lines behind the text."""
    colour = {"ink": INK, "muted": MUTED, "good": GOOD, "bad": BAD, "accent": ACCENT}[kind]
    classes = [*([f"t-{kind}"] if kind != "ink" else []), *(["halo"] if halo else [])]
    return element(
        "text",
        clean(words),
        x=x,
        y=y,
        class_=" ".join(classes) or None,
        fill=None if kind == "ink" else colour,
        stroke=PAPER if halo else None,
        stroke_width=4 if halo else None,
        paint_order="stroke" if halo else None,
        text_anchor=None if anchor == "start" else anchor,
        font_size=None if size == SMALL else size,
        font_weight="600" if bold else None,
    )


def line(
    x1: float, y1: float, x2: float, y2: float, *, kind: str = "line", width: float = 1.0, dash: str | None = None
) -> str:
    """A straight line."""
    return lines([(x1, y1, x2, y2)], kind=kind, width=width, dash=dash)


def lines(
    ends: Iterable[tuple[float, float, float, float]],
    *,
    kind: str = "line",
    width: float = 1.0,
    dash: str | None = None,
) -> str:
    """Straight lines of one style as one path."""
    path = "".join(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" for x1, y1, x2, y2 in ends)
    return stroke(path, kind=kind, width=width, dash=dash)


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """A path through the points.

    >>> polyline([(1, 2), (2.5, 1), (3, 1.1)])
    'M1 2L2.5 1L3 1.1'
    """
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def boxes(edges: Iterable[tuple[float, float, float, float]], fill: str) -> str:
    """Rectangles of one fill as one path. Each is (left, top, right, bottom).

    >>> boxes([(1, 2, 4, 12)], "url(#states)")
    '<path d="M1 2h3v10h-3z" class="box" fill="url(#states)"/>'
    """
    path = "".join(
        f"M{number(left)} {number(top)}h{number(right - left)}v{number(bottom - top)}h{number(left - right)}z"
        for left, top, right, bottom in edges
    )
    return element("path", d=path, class_="box", fill=fill)


def stroke(path: str, *, kind: str, width: float = 1.0, dash: str | None = None) -> str:
    """The outline of a path."""
    colour = {"line": LINE, "ink": INK, "muted": MUTED, "accent": ACCENT, "good": GOOD, "bad": BAD}[kind]
    return element(
        "path",
        d=path,
        class_=f"l-{kind}",
        stroke=colour,
        stroke_width=None if width == 1 else width,
        stroke_dasharray=dash,
        fill="none",
    )


def width_of(words: str, size: float = NORMAL, *, bold: bool = False) -> float:
    """An estimate of the width of a text in pixels, rather too large."""
    return len(words) * size * _EM * (1.12 if bold else 1.0)


def wrapped(words: str, width: float, size: float = NORMAL) -> list[str]:
    """The text in lines of at most `width` pixels. Longer words are broken."""
    return textwrap.wrap(words, max(4, int(width / (size * _EM)))) or [""]


def pattern(key: str, fill: Fill) -> str:
    """The pattern that `url(#KEY-FILL)` refers to."""
    ground = element("rect", width=8, height=8, class_=f"f-{fill.css}", fill=fill.colour)
    weave = element("path", d=fill.weave, class_="weave", stroke=PAPER, stroke_width=1.5, fill="none")
    return element(
        "pattern",
        ground,
        *([weave] if fill.weave else []),
        id=f"{key}-{fill.key}",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )


def legend(key: str, fills: Sequence[Fill], width: float, y: float, x: float = 0.0) -> tuple[str, float]:
    """Swatches with their names from `y` downwards, wrapped to `width`, and the y below them."""
    drawn, at = [], x
    for fill in fills:
        needed = 18 + width_of(fill.name) + 8
        if at > x and at + needed > width:
            at, y = x, y + 22
        drawn.append(element("rect", x=at, y=y, width=12, height=12, rx=2, fill=f"url(#{key}-{fill.key})"))
        drawn.append(text(at + 18, y + 10.5, fill.name, kind="muted"))
        at += needed + 6
    return "".join(drawn), y + 22


def frame(key: str, title: str, description: str, width: float, height: float, *body: str, fills: Sequence[Fill] = ()) -> str:  # fmt: skip
    """The whole drawing. `key` starts every id, so that ids are unique on a page with several drawings."""
    defs = element("defs", *(pattern(key, fill) for fill in fills)) if fills else ""
    return element(
        "svg",
        element("title", clean(title) or " ", id=f"{key}-title"),
        element("desc", clean(description) or " ", id=f"{key}-desc"),
        defs,
        element("rect", width=width, height=height, class_="paper", fill=PAPER),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-desc",
        class_="chart",
        fill=INK,
        font_family="system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
        font_size=SMALL,
    )


def stacked(*drawings: str, title: str) -> str:
    """Several drawings of `frame` below each other, as one drawing."""
    gap = 16
    sizes = [tuple(map(float, _VIEW_BOX.search(drawing).groups())) for drawing in drawings]  # type: ignore[union-attr]  # `frame` writes one
    width, height = max(w for w, _ in sizes), sum(h for _, h in sizes) + gap * (len(sizes) - 1)
    body, at = [], 0.0
    for drawing, (_, h) in zip(drawings, sizes, strict=True):
        body.append(element("g", drawing, transform=f"translate(0 {number(at)})"))
        at += h + gap
    return frame("stacked", title, f"{len(drawings)} drawings.", width, height, *body)


_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
