"""`fsdp-advisor export TARGET`: the files or the command that launch a job with one consumer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fsdp_advisor.cli.options import ConfigFileOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Folder, note
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.parsing import make_request

if TYPE_CHECKING:
    from fsdp_advisor.export import Job, Target


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ConfigFileOptions):
    """Options of `export` apart from those of the job."""

    target: Annotated[
        str | None, Rule(about="the consumer of the files; --list shows them", metavar="TARGET", positional=True)
    ] = None
    list: Annotated[bool, Rule(about="list the targets and exit")] = False
    output: Annotated[
        str | None,
        Rule(
            about="the file to write instead of standard output; a directory, or a name that ends in /, gets every file "
            "that a launch needs",
            metavar="FILE|DIR/",
        ),
    ] = None
    force: Annotated[bool, Rule(about="let -o overwrite files")] = False
    quiet: Annotated[bool, Rule(about="no notes on standard error")] = False

    @property
    def folder(self) -> Folder | None:
        """The directory to write a bundle into; None if a single file is wanted."""
        if self.output is None or not (self.output.endswith(("/", os.sep)) or Path(self.output).is_dir()):
            return None
        return Folder(path=Path(self.output), force=self.force)

    @property
    def file(self) -> Destination:
        """The single file, or standard output."""
        return Destination(path=None if self.output is None else Path(self.output), force=self.force)


def export(given: Mapping[str, Any], options: ExportOptions) -> int:
    """The files that launch a job: for accelerate, DeepSpeed, Trainer, TRL, axolotl, LLaMA-Factory, a PyTorch script, or a launch line.

    The job is the one that --strategy names; without it, the fastest one that fits and that the target supports. Options
    that are given are fixed, the others are searched. Exit status: 0 if it fits; 1 if it does not or nothing does; 2 for bad
    usage, or for a job that the target does not support.
    """
    import fsdp_advisor.export as targets
    from fsdp_advisor.export.choice import report_for

    folder = options.folder
    if options.list:
        width = max(map(len, targets.TARGETS))
        options.file.write("\n".join(f"{t.name:<{width}}  {t.description}" for t in targets.TARGETS.values()))
        return FITS
    if options.target is None:
        raise UsageError("TARGET is missing", hint="fsdp-advisor export --list shows the targets")
    consumer = targets.find(options.target)
    (folder or options.file).check()
    report = report_for(consumer.name, make_request(given))
    (chosen,) = report.estimates
    job = targets.Job.of(report, chosen)
    for remark in report.notes:
        note(remark, quiet=options.quiet)
    if folder is not None:
        _write_bundle(folder, consumer, job, quiet=options.quiet)
    else:
        _write_file(options, consumer, job)
    if chosen.fits is False:
        note(f"{job.strategy} does not fit {job.gpu_name}")
    return NONE_FITS if chosen.fits is False else FITS


def _write_bundle(folder: Folder, consumer: Target, job: Job, *, quiet: bool) -> None:
    from fsdp_advisor.export.bundle import bundle

    made = bundle(consumer, job)
    for remark in made.notes:
        note(remark, quiet=quiet)
    folder.write({file.name: (file.text, file.executable) for file in made.files})
    note(f"{job.title}; {folder.path} has {', '.join(file.name for file in made.files)}", quiet=quiet)


def _write_file(options: ExportOptions, consumer: Target, job: Job) -> None:
    """Write the single file. Notes on standard error state the command that uses the file, and the plan if the file format has no
    comments.
    """
    from fsdp_advisor.export import export as exported_by
    from fsdp_advisor.export.header import summary

    exported = exported_by(consumer.name, job)
    quiet = options.quiet
    for remark in exported.notes:
        note(remark, quiet=quiet)
    if exported.media_type == "application/json":  # JSON has no comments
        for line in summary(job)[1:-1]:
            note(line, quiet=quiet)
    options.file.write(exported.text)
    if options.output is not None:
        note(f"{job.title}; {consumer.line(job, shlex.quote(options.output))}", quiet=quiet)
