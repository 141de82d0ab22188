"""Destinations of an answer: standard output or a file, with their width, colours and characters."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_advisor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_advisor.render.terminal import Screen

FITS, NONE_FITS = 0, 1
"""Exit statuses."""


Format = Literal["text", "json", "markdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Standard output, or the file of `-o`. `force` allows overwriting it."""

    path: Path | None = None
    force: bool = False

    def check(self) -> None:
        """Raise UsageError for a file that cannot be written, before anything is computed."""
        path = self.path
        if path is None:
            return
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a directory", hint="give the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no directory {path.parent}", hint="make it first")
        if path.is_file() and not self.force:
            raise UsageError(f"{path} exists", hint="--force overwrites it")

    def screen(self) -> Screen:
        """The width, colours and characters of the destination."""
        from fsdp_advisor.render.terminal import DEFAULT_WIDTH, Screen  # JSON needs no rich

        columns = shutil.get_terminal_size(fallback=(DEFAULT_WIDTH, 50)).columns
        if self.path is not None:
            return Screen(width=columns if "COLUMNS" in os.environ else DEFAULT_WIDTH)
        stream = sys.stdout
        terminal = stream is not None and stream.isatty()
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        if not terminal and "COLUMNS" not in os.environ:
            columns = DEFAULT_WIDTH
        return Screen(width=max(columns, 20), colour=colour, unicode=_takes_unicode())

    def write(self, text: str) -> None:
        """Write the text with one newline at its end. Raises UsageError if that fails, BrokenPipeError if the reader of a pipe has
        ended.
        """
        text = text.rstrip("\n") + "\n"
        if self.path is not None:
            try:
                self.path.write_text(text, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise UsageError(f"cannot write {self.path}: {error.strerror}", hint="choose another file") from None
            return
        if sys.stdout is None:
            raise UsageError("standard output is closed", hint="-o FILE writes to a file")
        encoding = sys.stdout.encoding or "utf-8"
        try:
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError(
                f"cannot write standard output: {error.strerror}", hint="-o FILE writes to a file"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A directory for several files. It is created, with its parents. `force` allows overwriting files."""

    path: Path
    force: bool = False

    def check(self) -> None:
        """Raise UsageError for a directory that cannot be made, before anything is computed."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(
                f"cannot write into {self.path}: {existing} is a file", hint="give the name of a directory"
            )

    def write(self, files: Mapping[str, tuple[str, bool]]) -> None:
        """Write files by name: text, and whether it is executable. Raises UsageError, before any is written if one exists."""
        existing = [name for name in files if (self.path / name).exists()]
        if existing and not self.force:
            raise UsageError(f"{self.path / existing[0]} exists", hint="--force overwrites it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name, (text, executable) in files.items():
                file = self.path / name
                file.write_text(text.rstrip("\n") + "\n", encoding="utf-8", errors="backslashreplace")
                if executable:
                    file.chmod(file.stat().st_mode | 0o111)
        except OSError as error:
            raise UsageError(
                f"cannot write into {self.path}: {error.strerror}", hint="choose another directory"
            ) from None


def as_json(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2)


def note(text: str, *, quiet: bool = False) -> None:
    """Print a note on standard error."""
    if not quiet and sys.stderr is not None:
        print(f"note: {text}", file=sys.stderr)


def _takes_unicode() -> bool:
    try:
        "█▓▒░▚·".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
