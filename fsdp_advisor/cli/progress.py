"""Progress of a campaign on standard error."""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from fsdp_advisor.cli.output import note

if TYPE_CHECKING:
    from fsdp_advisor.validation.campaign import Event

_ERASE_LINE = "\r\x1b[K"


class Progress:
    """One line that is rewritten on a terminal, and a line per case elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._rewrites = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._started = time.monotonic()
        self._done_before: int | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rewrites:
            print(_ERASE_LINE, end="", file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        """Show how far the campaign is and the case that has ended."""
        if not self._rewrites:
            note(f"{event.done}/{event.total} {_describe(event)}", quiet=self._quiet)
            return
        line = f"{event.done}/{event.total} {self._time_left(event)}{_describe(event)}"
        print(_ERASE_LINE + line[: get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)

    def _time_left(self, event: Event) -> str:
        """The time that the remaining cases take at the rate so far; empty before the first case has ended."""
        if self._done_before is None:
            self._done_before = event.done
        finished = event.done - self._done_before
        if finished == 0:
            return ""
        seconds = (time.monotonic() - self._started) / finished * (event.total - event.done)
        return f"({int(seconds // 60)}:{int(seconds % 60):02} left) "


def _describe(event: Event) -> str:
    from fsdp_advisor.validation.report import main_figure, signed_percent

    if event.record is None:
        return "starting" if event.done < event.total else "nothing left to do"
    record = event.record
    figure = main_figure(record)
    error = record.errors.get(figure) if figure else None
    text = f"{record.label}: {record.outcome}" + (f", {signed_percent(error)}" if error is not None else "")
    return text + (f" ({record.message})" if record.message and record.outcome not in ("ok", "oom") else "")
