"""`fsdp-advisor diagnose`: why a GPU ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fsdp_advisor.cli.config_files import reading_lines
from fsdp_advisor.cli.options import ConfigFileOptions, ReportOptions
from fsdp_advisor.cli.output import as_json, note
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.units import format_gib

DIAGNOSED = 0
"""Exit status after a diagnosis."""


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ConfigFileOptions, ReportOptions):
    """Options of `diagnose` apart from those of the job."""

    file: Annotated[
        str | None,
        Rule(
            about="the text of an out-of-memory error, a log, or a memory snapshot (gzip too); - for standard input",
            metavar="FILE",
            positional=True,
        ),
    ] = None
    device: Annotated[
        int | None, Rule(about="the GPU of a snapshot that has several", default="the one with an error", ge=0)
    ] = None


_LONG_BYTES = 200 * 2**20
_BYTES_PER_MINUTE = 300 * 2**20
"""A snapshot is read at about this rate, and text much faster."""


def _warn_of_size(options: DiagnoseOptions) -> None:
    """Say how long a large file takes."""
    try:
        n_bytes = Path(options.file or "").stat().st_size
    except OSError:
        return
    if n_bytes > _LONG_BYTES:
        minutes = max(round(n_bytes / _BYTES_PER_MINUTE), 1)
        note(
            f"{options.file} has {format_gib(n_bytes)}; a snapshot of this size takes about {minutes} min",
            quiet=options.quiet,
        )


def diagnose(request: EstimateRequest | None, options: DiagnoseOptions) -> int:
    """What filled a GPU's memory, at which moment of the step, and the cheapest changes that make the job fit.

    FILE is text with PyTorch's out-of-memory error, or what torch.cuda.memory._dump_snapshot wrote. With the job's options or
    configuration the answer also says how the memory differs from the estimate. Exit status: 0 if it is diagnosed; 2 for bad usage
    or a file that cannot be read.
    """
    from fsdp_advisor.diagnosis import diagnose_file, job_of

    if options.file is None:
        raise UsageError("no file is given", hint="fsdp-advisor diagnose FILE, or - for standard input")
    form, destination = options.form, options.destination
    destination.check()
    for line in reading_lines(request.configs if request else ()):
        note(line, quiet=options.quiet)
    job = None if request is None else job_of(request)
    _warn_of_size(options)
    found = diagnose_file(options.file, job, device=options.device)
    if form == "json":
        destination.write(as_json(found.as_dict()))
        return DIAGNOSED
    from fsdp_advisor.render.diagnosis_text import diagnosis_text

    text = diagnosis_text(found, destination.screen())
    destination.write(f"```text\n{text}\n```" if form == "markdown" else text)
    return DIAGNOSED
