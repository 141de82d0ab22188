"""The little of SVG that the charts need: elements, text, patterns and the frame around them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from html import escape

from fsdp_advisor.charts.parts import Part

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
    return element(
        "text",
        clean(words),
        x=x,
        y=y,
        class_=" ".join(([] if kind == "ink" else [f"t-{kind}"]) + (["halo"] if halo else [])) or None,
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
    path = "".join(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" for x1, y1, x2, y2 in ends)
    return stroke(path, kind=kind, width=width, dash=dash)


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
