"""The result of reading a user's configuration file: settings that the job follows, and settings that it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.json_fields import json_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReading:
    """One configuration file of another tool.

    `read` are its settings that the job follows, `ignored` its keys that change neither memory nor time as far as is known, and
    `not_modelled` its settings whose effect no figure contains; `unknown` are keys that the tool does not have: misspelt, or arguments of
    the script. Every key of the file is in one of these four. `assumed` are assumptions that the job makes because no file gives a value.
    `missing` are files that it names and that were not found. `refused` are the settings among `not_modelled` because of which
    the job is not estimated, each with a hint. `layer_classes` are the classes of layers that it makes FSDP units.
    """

    file: str
    format: str
    read: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    layer_classes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The reading as JSON."""
        return json_fields(self, without=("refused", "layer_classes"))

    @property
    def lines(self) -> tuple[str, ...]:
        """The reading as text: one line for each category (read, ignored, ...) that is not empty."""
        kinds = (
            ("read", self.read, ", "),
            ("not modelled", self.not_modelled, "; "),
            ("assumed", self.assumed, "; "),
            ("not found (give it with --config-file)", self.missing, ", "),
            ("unknown (misspelt, of another version, or of the script)", self.unknown, ", "),
            ("ignored", self.ignored, ", "),
        )
        return (f"{self.file} ({self.format})", *(f"  {name}: {by.join(found)}" for name, found, by in kinds if found))


def check_nothing_missing(readings: Iterable[ConfigReading]) -> None:
    """Raises UsageError if a configuration names a file that was not found: the job is then not known."""
    missing = [f"{reading.file} names {name}" for reading in readings for name in reading.missing]
    if missing:
        raise UsageError(f"{missing[0]}, which was not found", hint="give it with --config-file, too")
