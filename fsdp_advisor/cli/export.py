"""`fsdp-advisor export TARGET`: the file or command that launches a job with one consumer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fsdp_advisor.cli.options import FileOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, note
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.parsing import make_request


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FileOptions):
    """Options of `export` apart from those of the job."""

    target: Annotated[
        str | None, Rule(about="the consumer of the file; --list shows them", metavar="TARGET", positional=True)
    ] = None
    list: Annotated[bool, Rule(about="list the targets and exit")] = False
    quiet: Annotated[bool, Rule(about="no notes on standard error")] = False


def export(given: Mapping[str, Any], options: ExportOptions) -> int:
    """The file that launches a job: for accelerate, DeepSpeed, Trainer, axolotl, a PyTorch script, or a launch line.

    The job is the one that --strategy names; without it, the fastest one that fits and that the target supports. Options
    that are given are fixed, the others are searched. Exit status: 0 if it fits; 1 if it does not or nothing does; 2 for bad
    usage, or for a job that the target does not support.
    """
    import fsdp_advisor.export as room
    from fsdp_advisor.export.choice import report_for

    output, quiet = options.output, options.quiet
    destination = Destination(path=output, force=options.force)
    if options.list:
        width = max(map(len, room.TARGETS))
        destination.write("\n".join(f"{t.name:<{width}}  {t.description}" for t in room.TARGETS.values()))
        return FITS
    if options.target is None:
        raise UsageError("TARGET is missing", hint="fsdp-advisor export --list shows the targets")
    consumer = room.find(options.target)
    destination.check()
    report = report_for(consumer.name, make_request(given))
    (chosen,) = report.estimates
    job = room.Job.of(report, chosen)
    exported = room.export(consumer.name, job)
    for remark in (*report.notes, *exported.notes):
        note(remark, quiet=quiet)
    destination.write(exported.text)
    if chosen.fits is False:
        note(f"{job.strategy} does not fit {job.gpu_name}")
    if output is not None:
        note(f"{job.title}; {consumer.usage(job, shlex.quote(str(output)))}", quiet=quiet)
    return NONE_FITS if chosen.fits is False else FITS
