"""The little of SVG that the charts need: elements, text, patterns and the frame around them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from fsdp_advisor.render.parts import Part

INK, MUTED, LINE, PAPER, TINT = "#1b2129", "#57606c", "#dfe3e8", "#ffffff", "#f4f6f8"
ACCENT, GOOD, BAD = "#2b5f9e", "#0b6e55", "#b23c17"
"""Colours on light paper; a page restyles the same shapes through their classes."""

SMALL, NORMAL = 12.0, 13.0
"""Sizes of text, in pixels."""
_EM = 0.56
"""Mean advance of a character of a system font, in ems, on the safe side."""


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


def text(x: float, y: float, words: str, *, kind: str = "ink", anchor: str = "start", size: float = NORMAL, bold: bool = False, halo: bool = False) -> str:  # fmt: skip
    """A line of text on its baseline. `kind` is its class; with a `halo` it covers the lines behind it."""
    colour = {"ink": INK, "muted": MUTED, "good": GOOD, "bad": BAD, "accent": ACCENT}[kind]
    looks = {f"t-{kind}": kind != "ink", "n": size == NORMAL, "b": bold, anchor: anchor != "start", "halo": halo}
    return element(
        "text",
        clean(words),
        x=x,
        y=y,
        class_=" ".join(look for look, has in looks.items() if has) or None,
        fill=None if kind == "ink" else colour,
        stroke=PAPER if halo else None,
        stroke_width=4 if halo else None,
        paint_order="stroke" if halo else None,
        text_anchor=None if anchor == "start" else anchor,
        font_size=None if size == SMALL else size,
        font_weight="600" if bold else None,
    )


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str = "line", width: float = 1.0, dash: str | None = None) -> str:  # fmt: skip
    """A straight line."""
    return lines([(x1, y1, x2, y2)], kind=kind, width=width, dash=dash)


def lines(ends: Iterable[tuple[float, float, float, float]], *, kind: str = "line", width: float = 1.0, dash: str | None = None) -> str:  # fmt: skip
    """Straight lines that look alike, as one shape."""
    path = "".join(f"M{number(x1)} {number(y1)}{_to(x1, y1, x2, y2)}" for x1, y1, x2, y2 in ends)
    return stroke(path, kind=kind, width=width, dash=dash)


def _to(x1: float, y1: float, x2: float, y2: float) -> str:
    if x1 == x2:
        return f"V{number(y2)}"
    return f"H{number(x2)}" if y1 == y2 else f"L{number(x2)} {number(y2)}"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """A path through the points, each said by its distance from the one before: a long one stays short.

    >>> polyline([(1, 2), (2.5, 1), (3, 1.1)])
    'M1 2l1.5-1 .5 .1'
    """
    at = [(round(10 * x), round(10 * y)) for x, y in points]
    ways = [_tenths(b - a) for here, there in pairwise(at) for a, b in zip(here, there, strict=True)]
    return f"M{_tenths(at[0][0])} {_tenths(at[0][1])}" + (f"l{_listed(ways)}" if ways else "")


def bands(boxes: Iterable[tuple[float, float, float]], height: float, fill: str) -> str:
    """Boxes of one height and one look, drawn as one thick stroke. Of each: its left, its top, its width.

    >>> bands([(1, 2, 3), (5, 2, 0.5)], 10, "url(#woven)")
    '<path d="M1 7h3m1 0h.5" class="band" stroke="url(#woven)" stroke-width="10" fill="none"/>'
    """
    path, end = "", None
    for x, y, width in boxes:
        left, middle, wide = round(10 * x), round(10 * (y + height / 2)), round(10 * width)
        to = (left, middle) if end is None else (left - end[0], middle - end[1])
        path += f"{'M' if end is None else 'm'}{_listed(map(_tenths, to))}h{_tenths(wide)}"
        end = left + wide, middle
    return element("path", d=path, class_="band", stroke=fill, stroke_width=height, fill="none")


def dashes(boxes: Sequence[tuple[float, float]], y: float, height: float, fill: str) -> str:
    """Boxes of one look in a row, drawn as one thick broken line. Of each: its left and its right.

    >>> dashes([(1, 3), (5, 5.5)], 2, 10, "url(#woven)")
    '<path d="M1 7H5.5" class="band" stroke="url(#woven)" stroke-width="10" stroke-dasharray="2 2 .5" fill="none"/>'
    """
    edges = [round(10 * edge) for box in boxes for edge in box]
    return element(
        "path",
        d=f"M{_tenths(edges[0])} {number(y + height / 2)}H{_tenths(edges[-1])}",
        class_="band",
        stroke=fill,
        stroke_width=height,
        stroke_dasharray=_listed(_tenths(b - a) for a, b in pairwise(edges)) if len(boxes) > 1 else None,
        fill="none",
    )


def _tenths(value: int) -> str:
    """Tenths of a pixel in pixels.

    >>> _tenths(-5), _tenths(120)
    ('-.5', '12')
    """
    return number(value / 10).replace("0.", ".", 1) if abs(value) < 10 else number(value / 10)


def _listed(numbers: Iterable[str]) -> str:
    return " ".join(numbers).replace(" -", "-")


def stroke(path: str, *, kind: str, width: float = 1.0, dash: str | None = None) -> str:
    """A path that is drawn and not filled."""
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
    """About how wide a text is, in pixels; never much less than it is."""
    return len(words) * size * _EM * (1.12 if bold else 1.0)


def wrapped(words: str, width: float, size: float = NORMAL) -> list[str]:
    """The text in lines that fit `width` pixels; a longer word is broken."""
    return textwrap.wrap(words, max(4, int(width / (size * _EM)))) or [""]


def pattern(key: str, part: Part) -> str:
    """A part's fill: its colour, woven so that it is told without colour too."""
    ground = element("rect", width=8, height=8, class_=f"f-{part.shade or part.key}", fill=part.colour)
    weave = element("path", d=part.weave, class_="weave", stroke=PAPER, stroke_width=1.5, fill="none")
    return element(
        "pattern",
        ground,
        *([weave] if part.weave else []),
        id=f"{key}-{part.key}",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )


def legend(key: str, parts: list[Part], width: float, y: float, x: float = 0.0) -> tuple[str, float]:
    """Swatches with their names from `y` down, wrapped to `width`; and where they end."""
    drawn, at = [], x
    for part in parts:
        needed = 18 + width_of(part.name) + 8
        if at > x and at + needed > width:
            at, y = x, y + 22
        drawn.append(element("rect", x=at, y=y, width=12, height=12, rx=2, fill=f"url(#{key}-{part.key})"))
        drawn.append(text(at + 18, y + 10.5, part.name, kind="muted"))
        at += needed + 6
    return "".join(drawn), y + 22


def frame(key: str, title: str, description: str, width: float, height: float, *body: str, parts: list[Part] | None = None) -> str:  # fmt: skip
    """The whole drawing. `key` makes its ids its own among the drawings of a page."""
    defs = element("defs", *(pattern(key, part) for part in parts)) if parts else ""
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


def stacked(*drawings: str, title: str, gap: float = 16) -> str:
    """Drawings of `frame`, one below the other, as one."""
    sizes = [tuple(map(float, _VIEW_BOX.search(drawing).groups())) for drawing in drawings]  # type: ignore[union-attr]  # `frame` writes one
    width, height = max(w for w, _ in sizes), sum(h for _, h in sizes) + gap * (len(sizes) - 1)
    body, at = [], 0.0
    for drawing, (_, h) in zip(drawings, sizes, strict=True):
        body.append(element("g", drawing, transform=f"translate(0 {number(at)})"))
        at += h + gap
    return frame("stacked", title, f"{len(drawings)} drawings.", width, height, *body)


_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
