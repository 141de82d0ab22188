"""The places where a script used a value that it read from the GPU."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

MOST_PLACES = 50
"""The largest number of places that are kept: the first ones."""
_HERE = "/rehearsal/inside/"
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python")


@dataclass
class Decision:
    """One line of code that reads values of the GPU."""

    place: str
    """The innermost line outside PyTorch, as file:line."""
    operation: str
    """`item()`, `nonzero`, `copy to the host`, ..."""
    expression: str
    """The text of that line."""
    caller: str
    """The script's own line that led there, as file:line."""
    value: Any
    """The result of the first reading: a number, or a description."""
    count: int = 1


_found: dict[tuple[str, int, str], Decision] = {}


def decisions() -> list[dict[str, Any]]:
    """The first places that read values of the GPU, in the order in which the script reached them. Each is a JSON object."""
    return [dict(vars(each)) for each in _found.values()]


def note(operation: str, value: Any, *, in_torch: bool = True) -> None:
    """Count one reading of a value. `value` is the result that the script got; only the first one of each place is kept.

    `in_torch` says whether to keep a reading by PyTorch's own Python code, such as a copy of a state to the host.
    """
    innermost = _outside(sys._getframe(1), _is_inside)
    if innermost is not None and not in_torch and _is_torch(innermost.f_code.co_filename):
        return
    frame = _outside(innermost, _is_torch)
    if frame is None:  # the backward pass runs in a separate thread
        return
    key = frame.f_code.co_filename, frame.f_lineno, operation
    known = _found.get(key)
    if known is not None:
        known.count += 1
    elif len(_found) < MOST_PLACES:
        script = _outside(frame, _is_library)
        _found[key] = Decision(
            place=f"{key[0]}:{key[1]}",
            operation=operation,
            expression=linecache.getline(key[0], key[1]).strip(),
            caller=f"{script.f_code.co_filename}:{script.f_lineno}" if script is not None else "",
            value=value,
        )


def _outside(frame: FrameType | None, inside: Any) -> FrameType | None:
    while frame is not None and inside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@cache
def _is_inside(file: str) -> bool:
    return _HERE in file


@cache
def _is_torch(file: str) -> bool:
    return "/torch/" in file or _HERE in file


@cache
def _is_library(file: str) -> bool:
    return file.startswith("<") or _HERE in file or any(part in file for part in _LIBRARIES)
