"""`fsdp-advisor compare A B`: which of two jobs fits, and what each difference between them costs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fsdp_advisor.cli.config_files import with_readings
from fsdp_advisor.cli.options import CommandParser, ConfigFileOptions, ReportOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, as_json, note
from fsdp_advisor.configs import request_with_files
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.fields import Rule, fields_of, read_fields, shown
from fsdp_advisor.job.request import EstimateRequest


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ReportOptions):
    """Options of `compare` apart from those of the jobs."""

    a: Annotated[
        str | None,
        Rule(
            about="a configuration file or directory, or options in quotes, or both: 'fsdp.yaml --gpu H100'",
            metavar="A",
            positional=True,
        ),
    ] = None
    b: Annotated[str | None, Rule(about="the same for the other job", metavar="B", positional=True)] = None


def compare(given: Mapping[str, Any], options: CompareOptions) -> int:
    """Two jobs side by side: which fits, and what each difference costs in memory and time.

    Options outside the quotes apply to both jobs. Example: compare "--gpu H100" "--gpu A100-40GB" --model gpt2 --gpus 8.
    Exit status: 0 if both fit; 1 if one does not or it is unknown; 2 for bad usage, an unknown model or an unreadable file.
    """
    from fsdp_advisor.comparison import compare as compared

    if options.a is None or options.b is None:
        raise UsageError(
            "two jobs are needed", hint="fsdp-advisor compare A B, each a configuration file or options in quotes"
        )
    form, destination = options.form, options.destination
    destination.check()
    a, b = (request_of(text, given) for text in (options.a, options.b))
    found = compared(a, b)
    for remark in found.notes:
        note(remark, quiet=options.quiet)
    if form == "json":
        destination.write(as_json(found.as_dict()))
    else:
        from fsdp_advisor.render.comparison_text import comparison_text

        screen = destination.screen()
        text = comparison_text(found, screen)
        readings, width = (*a.configs, *b.configs), screen.width
        markdown = form == "markdown"
        text = f"```text\n{text}\n```" if markdown else text
        destination.write(with_readings(text, readings, width, markdown=markdown))
    return FITS if found.a.row.fits and found.b.row.fits else NONE_FITS


def request_of(text: str, common: Mapping[str, Any]) -> EstimateRequest:
    """The job of one side. Its own options win over `common` ones, and all options win over files.

    Raises UsageError for a text that is neither an existing file nor options.
    """
    files, own = _parsed(text)
    known = fields_of(EstimateRequest)
    fields = read_fields(common, known) | read_fields(with_files_read(own), known)
    return request_with_files({**fields, "config_file": files}, EstimateRequest)


def _parsed(text: str) -> tuple[list[Path], dict[str, Any]]:
    if Path(text).exists():
        return [Path(text)], {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{shown(text)}: {error}", hint="close the quotes") from None
    parser = CommandParser("compare", "A B", "")
    parser.add_fields((*fields_of(EstimateRequest).values(), *fields_of(ConfigFileOptions).values()))
    first = next((i for i, word in enumerate(words) if word.startswith("-") or "=" in word), len(words))
    given = parser.parse(words[first:]) or {}
    for word in words[:first]:
        if word != "-" and not Path(word).exists() and not Path(word).suffix[1:].isalpha():  # perhaps a model
            raise UsageError(
                f"{shown(word)} is neither a file nor options",
                hint="A and B are configuration files, or options in quotes: compare '--model gpt2' '--model gpt2-xl' --gpus 8 --gpu H100",
            )
    files = [Path(word) for word in (*words[:first], *given.pop("config_file", ()))]
    if not files and not given:
        raise UsageError(f"{shown(text)} is neither a file nor options", hint="write it as '--gpu H100 --gpus 8'")
    return files, given
