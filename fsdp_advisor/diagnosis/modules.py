"""Finds the class to which a line of code belongs, if its file is on this machine. No code is run."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from fsdp_advisor.diagnosis.snapshot import Frame

_MAX_BYTES = 4 * 2**20
_Spans = tuple[tuple[int, int, str, str], ...]


def class_of(frame: Frame) -> str:
    """The class whose method the frame runs; empty if the file is missing or its version differs from the one that ran.

    The version counts as different if the function at that line has another name.
    """
    inner = [span for span in _methods(frame.filename) if span[0] <= frame.line <= span[1]]
    if not inner:
        return ""
    _, _, function, owner = max(inner)
    return owner if function == frame.name else ""


@lru_cache(maxsize=256)
def _methods(filename: str) -> _Spans:
    """(first line, last line, name, class) of each method in a file."""
    path = Path(filename)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return ()
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    return tuple(
        (method.lineno, method.end_lineno or method.lineno, method.name, owner.name)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    )
