"""Jinja templates for exports. Filters quote every value for the language of the file, so no value can inject code."""

from __future__ import annotations

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

INDENT = "    "


def python_literal(value: Any, depth: int = 0) -> str:
    """The Python source of a plain value. A dictionary has one line per key, indented by `depth` levels.

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
        return '"' + repr("'" + value)[2:]  # the added single quote makes repr use double quotes
    return repr(value)


_ENVIRONMENT = Environment(
    loader=PackageLoader("fsdp_advisor.export"),
    undefined=StrictUndefined,
    autoescape=False,  # the output is Python or shell, not HTML; the filters below quote values
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"python": python_literal, "shell": shlex.quote}


def render(template: str, **values: Any) -> str:
    """The text of a template of this package with the values filled in."""
    return _ENVIRONMENT.get_template(template).render(**values)
