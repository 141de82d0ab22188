"""JSON objects of dataclasses, for answers whose keys are the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


class JsonFields:
    """A dataclass whose JSON object has its fields, in their order."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return json_fields(self)


def json_fields(answer: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass by name, except those in `without`, as JSON values."""
    return {f.name: json_value(getattr(answer, f.name)) for f in fields(answer) if f.name not in without}


def json_value(value: Any) -> Any:
    """A field's value: objects with `as_dict` as that, tuples as lists, and mappings with text as keys."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if isinstance(value, tuple):
        return [json_value(item) for item in value]
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value
