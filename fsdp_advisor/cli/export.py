"""`export TARGET`: the file that launches a plan, for one consumer."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from fsdp_advisor.cli.options import ForceOption, OutputOption, QuietOption, takes_request
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, note
from fsdp_advisor.job.request import EstimateRequest


def register(app: typer.Typer) -> None:
    app.command()(export)


def _list(asked: bool) -> None:
    if asked:
        from fsdp_advisor.export import TARGETS

        width = max(map(len, TARGETS))
        Destination().write("\n".join(f"{t.name:<{width}}  {t.description}" for t in TARGETS.values()))
        raise typer.Exit


@takes_request
def export(
    request: EstimateRequest,
    *,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="What --list lists.", show_default=False)],
    list: Annotated[
        bool, typer.Option("--list", help="List the targets and exit.", callback=_list, is_eager=True)
    ] = False,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> int:
    """The file that launches a plan: for accelerate, DeepSpeed, Trainer, axolotl, a PyTorch script, or a launch line.

    Of the plan that --strategy names, else of the recommended one that the target can do; what is left out is then searched.
    Exit status: 0 it fits, 1 it does not or nothing does, 2 bad usage, or a plan that the target cannot do.
    """
    from fsdp_advisor import export as room
    from fsdp_advisor.export.choice import report_for

    destination = Destination(path=output, force=force)
    consumer = room.find(target)
    destination.check()
    report = report_for(consumer.name, request)
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
