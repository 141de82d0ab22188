"""The command line: parse, call, render. `main` is the console script, and turns every error into text."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from fsdp_advisor.cli.errors import complain

__all__ = ["complain", "main"]

_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status. No input ends in a traceback."""
    if argv is None:
        gc.set_threshold(50_000, 20, 20)  # collects rarely: the process is short, and collections take 5 % of its time
    try:
        from fsdp_advisor.cli.app import run  # imported here, so that Ctrl-C during the import is caught too

        status = run(sys.argv[1:] if argv is None else list(argv))
        if argv is None:
            gc.freeze()  # saves 10 % of the time: no garbage collection when the interpreter ends
        return status
    except BrokenPipeError:
        _discard_stdout()
        return _BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("FSDP_ADVISOR_DEBUG") and isinstance(error, Exception):
            raise
        return complain(error)


def _discard_stdout() -> None:
    """Send the interpreter's last flush to the null device, because the reader has gone."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None  # the stream was replaced and has no descriptor
