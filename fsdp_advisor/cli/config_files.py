"""Configuration files on the command line: the job that they describe, and the report on the settings that were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import fill
from typing import Any

from fsdp_advisor.cli.output import note
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.fields import fields_of, read_fields
from fsdp_advisor.job.request import EstimateRequest


def request_of_files(
    files: Sequence[Path], given: Mapping[str, Any], kind: type[EstimateRequest], partial: bool, options: Any
) -> EstimateRequest | dict[str, Any]:
    """The request that files and given options describe; options win. `partial`: return only its fields, and print the settings that were
    read.

    Raises UsageError for a file that cannot be read, and for a job that is incomplete.
    """
    from fsdp_advisor.configs import complete, from_paths, request_with_files  # only jobs with files need its readers

    if not partial:
        return request_with_files({**given, "config_file": files}, kind)
    found = complete(from_paths(files), read_fields(given, fields_of(kind)))
    for line in reading_lines(found.readings):
        note(line, quiet=getattr(options, "quiet", False))
    return dict(found.options)


@contextmanager
def hints_with_keys(files: Sequence[Path]) -> Iterator[None]:
    """Add to the hints of errors the keys of the files that are the same settings as the options in the hints."""
    try:
        yield
    except AdvisorError as error:
        from fsdp_advisor.configs.option_keys import with_keys

        with suppress(AdvisorError, OSError):  # a file that cannot be read is the error itself
            error.hint = with_keys(error.hint, files)
        raise


def reading_lines(readings: Sequence[ConfigReading]) -> tuple[str, ...]:
    """Lines of text that say which options each file gave."""
    return tuple(line for reading in readings for line in reading.lines)


def with_readings(text: str, readings: Sequence[ConfigReading], width: int = 120, *, markdown: bool = False) -> str:
    """The lines about the configuration files, then the answer."""
    wrapped = (fill(line, width, subsequent_indent="    ", break_on_hyphens=False) for line in reading_lines(readings))
    lines = "\n".join(wrapped)
    if not lines:
        return text
    return f"```text\n{lines}\n```\n\n{text}" if markdown else f"{lines}\n\n{text}"
