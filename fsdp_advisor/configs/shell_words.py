"""Divides shell scripts into commands and words without running them.

Variables are replaced by the values that the script assigns to them. Expressions that need a running shell stay as they are written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping

_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_UNKNOWN = "$unknown"
"""Replaces the unknown output of a command."""
_HEREDOC = re.compile(r"(?<!<)<<-?\s*[\"']?(\w+)[\"']?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)(&?\d*-?)(.*)")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def commands(text: str) -> Iterator[str]:
    """The simple commands of a script, in order: continued lines joined, comments and here-documents left out.

    >>> list(commands("a \\\\\\n b # c\\nd && e 'f; g' | h"))
    ['a   b', 'd', "e 'f; g'", 'h']
    """
    found, complete = _divided(text)
    if not complete:  # a quotation mark is not closed
        found = [part for line in re.sub(r"\\\n", " ", text).splitlines() for part in _divided(line)[0]]
    yield from found


def _divided(text: str) -> tuple[list[str], bool]:
    """(the commands, whether every quotation mark is closed)."""
    found: list[str] = []
    command: list[str] = []
    quote, depth, position = "", 0, 0
    heredocs: list[str] = []

    def end() -> None:
        joined = "".join(command).strip()
        if joined:
            found.append(joined)
        command.clear()

    while position < len(text):
        before, char, after = text[position - 1 : position], text[position], text[position + 1 : position + 2]
        position += 1
        if char == "\\" and after == "\n":
            command.append(" ")
            position += 1
        elif char == "\\" and quote != "'":
            command.append(char + after)
            position += 1
        elif quote:
            command.append(char)
            quote = "" if char == quote else quote
        elif char in "'\"":
            command.append(char)
            quote = char
        elif char == "#" and (not before or before.isspace()):
            position = _find(text, "\n", position)
        elif char == "(" and (depth or before in ("$", "=", "(")):
            command.append(char)
            depth += 1
        elif char == ")" and depth:
            command.append(char)
            depth -= 1
        elif depth:
            command.append(" " if char == "\n" else char)
        elif char == "<" and (match := _HEREDOC.match(text, position - 1)):
            heredocs.append(match[1])
            position = match.end()
        elif char == "&" and (after == ">" or before in ("<", ">")):
            command.append(char)
        elif char in "\n;&|()":
            end()
            if char == "\n":
                position = _after_heredocs(text, position, heredocs)
        else:
            command.append(char)
    end()
    return found, not quote and not depth


def _find(text: str, what: str, start: int) -> int:
    found = text.find(what, start)
    return len(text) if found < 0 else found


def _after_heredocs(text: str, position: int, tags: list[str]) -> int:
    """The position after the here-documents that begin at `position`. Empties the list of their tags."""
    while tags and position < len(text):
        end = _find(text, "\n", position)
        if text[position:end].strip() == tags[0]:
            tags.pop(0)
        position = end + 1
    tags.clear()
    return position


def assignment(command: str, variables: Mapping[str, str]) -> dict[str, str] | None:
    """The variables assigned by a command that consists only of assignments; None for other commands. Unknown values stay as written.

    >>> assignment("export N=2 M=$((N * 8))", {"N": "2"})
    {'N': '2', 'M': '16'}
    """
    body = re.sub(r"^(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*", "", command)
    match = _ASSIGNMENT.match(body)
    if match is None:
        return None
    if match[3].startswith("("):  # an array
        value = match[3].removeprefix("(").rstrip().removesuffix(")")
        before = variables.get(match[1], "") if match[2] else ""
        return {match[1]: f"{before} {expanded(value, variables)}".strip()}
    found: dict[str, str] = {}
    for word in words(body, variables):
        inner = _ASSIGNMENT.fullmatch(word)
        if inner is None:
            return None
        found[inner[1]] = (variables.get(inner[1], "") + inner[3]) if inner[2] else inner[3]
    return found


def expanded(command: str, variables: Mapping[str, str]) -> str:
    """The command with known variables and arithmetic replaced."""

    def value(match: re.Match[str]) -> str:
        name, default, plain = match.groups()
        known = variables.get(name or plain)
        return known if known else default if default is not None else match[0]

    for _ in range(4):  # nested default values
        before = command
        command = _ARRAY.sub(lambda match: variables.get(match[1], f"${match[1]}"), command)
        command = _VARIABLE.sub(value, command)
        if command == before:
            break
    command = _ARITHMETIC.sub(lambda match: _computed(match[1], variables), command)
    for _ in range(3):  # nested command substitutions
        command = _COMMAND.sub(_UNKNOWN, command)
    return command


def _computed(expression: str, variables: Mapping[str, str]) -> str:
    """The value of whole-number arithmetic.

    >>> _computed("N * (8 / 2)", {"N": "3"}), _computed("$X * 2", {})
    ('12', '$unknown')
    """
    text = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), expression)

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return int(_OPERATORS[type(op)](value(left), value(right)))
        raise ValueError(expression)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _UNKNOWN


def words(command: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a command without redirections, with known variables replaced. Unknown ones stay as they are written."""
    text = expanded(command, variables)
    try:
        found = shlex.split(text)
    except ValueError:
        found = text.split()
    kept: list[str] = []
    skips = False
    for word in found:
        match = _REDIRECTION.fullmatch(word)
        if skips or match is not None:
            skips = not skips and match is not None and not match[1] and not match[2]
        else:
            kept.append(word)
    return kept
