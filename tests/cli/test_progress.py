"""The lines on a terminal that say what is being recorded, and that a search is under way."""

from __future__ import annotations

import io
import sys
import time

import pytest

from fsdp_advisor.cli import progress
from fsdp_advisor.model.recorders import recording


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, quiet: bool = False) -> str:
    """What is on standard error after two recordings of 0.05 s, or after the first line of each."""
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.recordings_shown(quiet):
        for name in ("pasted.json", "pasted.json: a step of fsdp2"):
            with recording(name):
                end = time.monotonic() + (5 if stream.isatty() and not quiet else 0.05)
                while f"): {name}" not in stream.getvalue() and time.monotonic() < end:
                    time.sleep(0.005)
    return stream.getvalue()


def test_line_names_what_is_recorded_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    erased = "\r\x1b[K"
    lines = written(Terminal(), monkeypatch).split(erased)
    assert lines == ["", "recording (0 s): pasted.json", "", "recording (0 s): pasted.json: a step of fsdp2", ""]


def test_long_recordings_say_how_to_shorten_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", -1)
    assert "recording (0 s; --strategy NAME records less): pasted.json" in written(Terminal(), monkeypatch)


def test_one_note_in_a_pipe_says_that_recording_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.01)
    text = written(io.StringIO(), monkeypatch)
    assert text.count("note: ") == 1
    assert "(pasted.json)" in text and "finished recordings are kept" in text and "--strategy NAME records less" in text


def test_nothing_is_written_to_a_pipe_soon_or_with_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(io.StringIO(), monkeypatch) == ""
    assert written(Terminal(), monkeypatch, quiet=True) == ""


def test_recordings_outside_a_command_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    written(terminal, monkeypatch)
    before = terminal.getvalue()
    with recording("in Python"):
        time.sleep(0.05)
    assert terminal.getvalue() == before


def after_search(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, begins_after: float = 0.02, quiet: bool = False
) -> str:
    """What is on standard error after a search of 0.1 s, or after its first line."""
    monkeypatch.setattr(progress, "SEARCH_SECONDS", begins_after)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.search_shown(quiet):
        end = time.monotonic() + (5 if stream.isatty() and not quiet and begins_after < 1 else 0.1)
        while "searching" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
    return stream.getvalue()


def test_line_says_that_a_search_is_under_way_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_search(Terminal(), monkeypatch).split("\r\x1b[K") == ["", "searching (0 s)", ""]


def test_short_searches_and_pipes_have_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_search(Terminal(), monkeypatch, begins_after=60) == ""
    assert after_search(io.StringIO(), monkeypatch) == ""
    assert after_search(Terminal(), monkeypatch, quiet=True) == ""


def test_a_recording_replaces_the_line_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "SEARCH_SECONDS", 0.02)
    monkeypatch.setattr(progress, "WAIT_SECONDS", 60)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.recordings_shown(False), recording("pasted.json"), progress.search_shown(False):
        time.sleep(0.1)
    assert terminal.getvalue() == ""
