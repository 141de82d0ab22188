"""Text for a terminal, made with rich: tables that drop columns on narrow screens, and bars. Returns strings, prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_advisor.render.parts import MemoryPart

GAP = 2
DEFAULT_WIDTH = 120
"""Columns if there is no terminal and COLUMNS is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The width, colour and character set of the output."""

    width: int = DEFAULT_WIDTH
    colour: bool = False
    unicode: bool = True


class Column(NamedTuple):
    """One column of a table.

    `rank`: if the screen is too narrow, the column with the highest rank is dropped first; None: always shown. A cell may have several
    lines. `least`: the number of characters to which a column of sentences may be narrowed by wrapping its cells.
    """

    header: str
    cells: Sequence[str | Text]
    right: bool = False
    rank: int | None = None
    least: int | None = None

    @property
    def width(self) -> int:
        lines = [line for cell in self.cells for line in str(cell).split("\n")]
        return max(len(self.header), *map(len, lines), 0)


def widths(columns: Sequence[Column]) -> int:
    """The width of a table of these columns, in characters. A column that wraps counts at its least width."""
    return sum(min(c.width, c.least or c.width) for c in columns) + GAP * (len(columns) - 1)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width`. Others are dropped by rank, all columns of a rank together."""
    left = list(columns)
    ranks = sorted({c.rank for c in columns if c.rank is not None}, reverse=True)
    for rank in ranks:
        if widths(left) <= width:
            break
        left = [c for c in left if c.rank != rank]
    return left


def draw(columns: Sequence[Column], screen: Screen) -> str:
    """A table without rules. If it is wider than the screen, cells are wrapped, never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    roomy = widths(columns) <= screen.width
    for c in columns:
        table.add_column(
            Text(c.header),
            justify="right" if c.right else "left",
            no_wrap=(roomy and c.least is None) or c.right,
            overflow="fold",
        )
    for row in zip(*(c.cells for c in columns), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return paint(table, screen)


def paint(renderable: object, screen: Screen) -> str:
    """A rich renderable as text at the screen's width, with colour codes if the screen has colours."""
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=screen.width,
        force_terminal=screen.colour,
        force_jupyter=False,
        color_system="standard" if screen.colour else None,
        no_color=not screen.colour,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def wrap(text: str, screen: Screen, *, indent: str = "", first: str = "") -> str:
    """A paragraph wrapped at the screen's width. Words that are longer, such as a path, are not broken."""
    return textwrap.fill(
        text,
        screen.width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bar(parts: Sequence[tuple[MemoryPart, int]], whole: int, width: int, screen: Screen) -> Text:
    """A bar of `parts`, in bytes, on a scale of `whole` bytes. It ends with `>` if they exceed it.

    Running totals are rounded instead of single parts, so that the bar is as long as the total.
    """
    text = Text()
    done = drawn = 0
    over = sum(n for _, n in parts) > whole
    room = width - 1 if over else width
    for part, n_bytes in parts:
        done += n_bytes
        reached = min(round(done * width / whole), room)
        text.append((part.block if screen.unicode else part.letter) * (reached - drawn), style=part.terminal_colour)
        drawn = reached
    if over:
        return text.append(">", style="bold red")
    return text.append(("·" if screen.unicode else ".") * (width - drawn), style="dim")


def legend(parts: Sequence[MemoryPart], screen: Screen) -> str:
    """The characters of a bar with their meanings. Lines break between entries."""
    lines: list[Text] = []
    for part in parts:
        entry = Text().append(part.block if screen.unicode else part.letter, style=part.terminal_colour)
        entry.append(f" {part.meaning}")
        if lines and len(lines[-1]) + GAP + len(entry) <= screen.width:
            lines[-1].append(" " * GAP).append(entry)
        else:
            lines.append(entry)
    return "\n".join(paint(line, screen) for line in lines)
