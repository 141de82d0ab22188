"""Errors as text: one or two lines on standard error, and the exit status."""

from __future__ import annotations

import sys
from contextlib import suppress

from fsdp_advisor.errors import MAX_MESSAGE, AdvisorError

BAD_USAGE = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


def complain(error: BaseException) -> int:
    """Print an error on standard error. Returns its exit status."""
    if isinstance(error, AdvisorError):
        return _print(error.message, error.hint, error.exit_status)
    if isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        return _print(message, "does the file or folder exist, and may you read and write it?", BAD_USAGE)
    if isinstance(error, Exception):
        message = f"internal error: {type(error).__name__}: {error}"
        return _print(message, "please report it; FSDP_ADVISOR_DEBUG=1 shows the traceback", BAD_USAGE)
    return _print("interrupted", None, INTERRUPTED)


def _print(message: str, hint: str | None, status: int) -> int:
    lines = [f"fsdp-advisor: {_one_line(message)}", *([f"hint: {_one_line(hint)}"] if hint else [])]
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed
        print("\n".join(lines), file=sys.stderr, flush=True)
    return status


def _one_line(text: str) -> str:
    """The text on one line, without control characters, at most MAX_MESSAGE long."""
    flat = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return flat if len(flat) <= MAX_MESSAGE else flat[: MAX_MESSAGE - 4] + " ..."
