"""The command line: parse, call, render. `main` is the console script, and the one place where errors become text."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["main"]

_BAD_USAGE = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_LONGEST = 400  # characters of a message; hostile input is quoted in it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the process's exit status. Nothing that a user can do ends in a traceback."""
    if argv is None:
        gc.set_threshold(50_000, 20, 20)  # a process of a tenth of a second: collecting costs it a twentieth
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:
        _forget_stdout()
        return _BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("FSDP_ADVISOR_DEBUG") and isinstance(error, Exception):
            raise
        return complain(error)


def complain(error: BaseException) -> int:
    """An error as lines on standard error; the exit status that goes with it."""
    if isinstance(error, Exception):
        return _say(*_describe(error))
    return _say("interrupted", None, _INTERRUPTED)


def _run(arguments: list[str]) -> int:
    """By the short way or by typer's. Imported here, so that an interrupted import is caught too."""
    from fsdp_advisor.cli.plain import estimate_asked

    plain = estimate_asked(arguments)
    if plain is not None:
        from fsdp_advisor.cli.estimate import estimate

        request, own = plain
        return estimate(request, **own)
    from fsdp_advisor.cli.app import run

    return run(arguments)


def _describe(error: Exception) -> tuple[str, str | None, int]:
    """Message, hint and exit status of whatever went wrong."""
    from fsdp_advisor.errors import AdvisorError

    if isinstance(error, AdvisorError):
        return error.message, error.hint, error.exit_status
    if hasattr(error, "format_message"):  # typer's usage errors; their class has moved between typer's versions
        return _describe_usage(error)
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        return what, "is the file or folder there, and may you read and write it?", _BAD_USAGE
    what = f"internal error: {type(error).__name__}: {error}"
    return what, "please report it; FSDP_ADVISOR_DEBUG=1 shows where it happened", _BAD_USAGE


def _describe_usage(error: Exception) -> tuple[str, str, int]:
    """Typer's complaint in this program's shape: lower case, no quotes around options, the suggestion as the hint."""
    possible: Sequence[str] = getattr(error, "possibilities", None) or ()
    context = getattr(error, "ctx", None)
    at_root = context is not None and context.parent is None
    message = str(getattr(error, "message", "")) if possible else str(error.format_message())  # type: ignore[attr-defined]  # see above
    message, _, meant = message.partition(" Did you mean ")
    message = re.sub(r"'(--?[\w-]+)'", r"\1", message.replace("Value error, ", "").strip().removesuffix("."))
    hint = f"see {context.command_path if context else 'fsdp-advisor'} --help"
    if meant or (possible and not at_root):
        hint = f"did you mean {meant.rstrip('?') or ' or '.join(possible)}?"
    elif at_root and hasattr(error, "option_name"):
        hint = "options come after the command, as in: fsdp-advisor estimate --model MODEL --gpus N"
    return message[:1].lower() + message[1:], hint, _BAD_USAGE


def _say(message: str, hint: str | None, status: int) -> int:
    """One or two lines on standard error."""
    lines = [f"fsdp-advisor: {_one_line(message)}", *([f"hint: {_one_line(hint)}"] if hint else [])]
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed: there is nobody to tell
        print("\n".join(lines), file=sys.stderr, flush=True)
    return status


def _one_line(text: str) -> str:
    """Printable, on one line, of bounded length."""
    flat = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 4] + " ..."


def _forget_stdout() -> None:
    """The reader has gone: let the interpreter's last flush go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None  # a replaced stream without a descriptor
