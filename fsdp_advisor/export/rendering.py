"""Templates whose values are quoted by what they are written in: a value is never pasted as it came."""

from __future__ import annotations

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

INDENT = "    "


def python_literal(value: Any, depth: int = 0) -> str:
    """The Python source of a plain value; a dictionary goes over several lines, indented by `depth`.

    >>> python_literal({"a": [1, "it's"]})
    '{\\n    "a": [1, "it\\'s"],\\n}'
    """
    if isinstance(value, dict):
        inner = INDENT * (depth + 1)
        lines = "".join(f"{inner}{python_literal(k)}: {python_literal(v, depth + 1)},\n" for k, v in value.items())
        return "{\n" + lines + INDENT * depth + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr("'" + value)[2:]  # the quote that is put before it makes repr take double ones
    return repr(value)


_ENVIRONMENT = Environment(
    loader=PackageLoader("fsdp_advisor.export"),
    undefined=StrictUndefined,
    autoescape=False,  # it writes Python and shell, whose filters are below
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"python": python_literal, "shell": shlex.quote}


def render(template: str, **values: Any) -> str:
    """The text of a template of this room."""
    return _ENVIRONMENT.get_template(template).render(**values)
