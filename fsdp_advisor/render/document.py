"""An answer as paragraphs, tables and lists, and its two layouts: Markdown, and HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.errors import assert_never


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list. `nested`: each item is nested within the previous one."""

    texts: tuple[str, ...]
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `right`: for each column, whether its cells are numbers, which are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Code:
    """Lines that are shown unchanged; `language` is the name after Markdown's fence."""

    text: str
    language: str = "text"


Block = Heading | Paragraph | Items | Table | Code


def to_markdown(blocks: Sequence[Block]) -> str:
    """The blocks in Markdown, with an empty line between two, without a final newline."""
    return "\n\n".join(map(_in_markdown, blocks))


def _in_markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"**{_escaped(text)}**"
        case Paragraph(text):
            return _escaped(text)
        case Items(texts, nested):
            return "\n".join(f"{'  ' * i * nested}- {_escaped(text)}" for i, text in enumerate(texts))
        case Table(header, rows, right):
            alignment = ["---:" if number else "---" for number in right]
            return "\n".join("| " + " | ".join(map(_cell, cells)) + " |" for cells in (header, alignment, *rows))
        case Code(text, language):
            return f"```{language}\n{text}\n```"
        case _:
            assert_never(block)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escaped(text: str) -> str:
    """Text escaped for Markdown, so that names contain no emphasis and no tags."""
    for character in "\\`*_<":
        text = text.replace(character, "\\" + character)
    return text


def to_html(blocks: Sequence[Block]) -> str:
    """The blocks as an HTML fragment for notebooks. Its only style is the alignment of cells."""
    return f"<div>{''.join(map(_in_html, blocks))}</div>"


def _in_html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<p><strong>{html.escape(text)}</strong></p>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Items(texts, nested):
            if nested:
                return "".join(f"<ul><li>{html.escape(text)}" for text in texts) + "</li></ul>" * len(texts)
            return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"
        case Table(header, rows, right):
            head = _row("th", header, right)
            return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', cells, right) for cells in rows)}</tbody></table>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case _:
            assert_never(block)


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    made = (
        f'<{tag} style="text-align: {"right" if number else "left"}">{html.escape(cell)}</{tag}>'
        for cell, number in zip(cells, right, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"
