"""Progress on standard error: of recordings, of a search, and of a campaign."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from fsdp_advisor.cli.output import note

if TYPE_CHECKING:
    from fsdp_advisor.validation.campaign import Event

_ERASE_LINE = "\r\x1b[K"
WAIT_SECONDS = 3.0
"""How long a command records before it says so."""
LONG_SECONDS = 60.0
"""How long a command records before it says how to shorten that."""
SEARCH_SECONDS = 1.0
"""How long a command searches before it says so."""
_recording = threading.Event()
"""Whether something is being recorded. The line about it then replaces that about the search."""


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


@contextlib.contextmanager
def recordings_shown(quiet: bool) -> Iterator[None]:
    """A context that says what is being recorded: on a terminal in one line, once recordings have taken `WAIT_SECONDS`; elsewhere in a
    note, once they have taken `LONG_SECONDS`.
    """
    if quiet or sys.stderr is None:
        yield
        return
    from fsdp_advisor.model.recorders import watching

    line = _RecordingLine() if sys.stderr.isatty() else _RecordingNote()
    with watching(line.shown):
        yield


@contextlib.contextmanager
def search_shown(quiet: bool) -> Iterator[None]:
    """A context that says on a terminal that a search is under way, once it has taken `SEARCH_SECONDS`."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    begin, done = time.monotonic(), threading.Event()

    def line() -> str | None:
        return None if _recording.is_set() else f"searching ({int(time.monotonic() - begin)} s)"

    thread = threading.Thread(target=_rewrite, args=(line, SEARCH_SECONDS, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rewrite(line: Callable[[], str | None], wait: float, done: threading.Event) -> None:
    """Rewrite a line on the terminal each second, first after `wait` seconds, until it is done, and then erase it. None: leave the
    terminal as it is.
    """
    written = False
    while not done.wait(max(wait, 0)):
        wait = 1
        if (text := line()) is not None:
            written = True
            print(_ERASE_LINE + text[: get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
    if written:
        print(_ERASE_LINE, end="", file=sys.stderr, flush=True)


class _Recordings:
    """The time that recordings have taken, and a thread that writes about it while something is being recorded."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def _write(self, what: str, begin: float, done: threading.Event) -> None:
        """Write about the recording of `what` until it is done; `begin` is when it would have begun if nothing had interrupted the
        recordings.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Context of one recording."""
        done = threading.Event()
        begin = time.monotonic() - self._seconds
        thread = threading.Thread(target=self._write, args=(what, begin, done), daemon=True)
        thread.start()
        _recording.set()
        try:
            yield
        finally:
            done.set()
            thread.join()
            _recording.clear()
            self._seconds = time.monotonic() - begin


class _RecordingLine(_Recordings):
    """A line on a terminal that is rewritten each second."""

    def _write(self, what: str, begin: float, done: threading.Event) -> None:
        def line() -> str:
            seconds = time.monotonic() - begin
            advice = "; --strategy NAME records less" if seconds > LONG_SECONDS else ""
            return f"recording ({int(seconds)} s{advice}): {what}"

        _rewrite(line, begin + WAIT_SECONDS - time.monotonic(), done)


class _RecordingNote(_Recordings):
    """A note, written once."""

    def __init__(self) -> None:
        super().__init__()
        self._written = False

    def _write(self, what: str, begin: float, done: threading.Event) -> None:
        if not self._written and not done.wait(max(begin + LONG_SECONDS - time.monotonic(), 0)):
            self._written = True
            note(
                f"recording takes more than {LONG_SECONDS:g} s ({what}); finished recordings are kept, also if the command is interrupted,"
                " and --strategy NAME records less"
            )


def _describe(event: Event) -> str:
    from fsdp_advisor.validation.report import main_figure, signed_percent

    if event.record is None:
        return "starting" if event.done < event.total else "nothing left to do"
    record = event.record
    figure = main_figure(record)
    error = record.errors.get(figure) if figure else None
    text = f"{record.label}: {record.outcome}" + (f", {signed_percent(error)}" if error is not None else "")
    return text + (f" ({record.message})" if record.message and record.outcome not in ("ok", "oom") else "")
