"""`fsdp-advisor validate`: run a job, or a campaign of them, on the best rung there is; `validate report` reads the records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fsdp_advisor.cli.options import ReportOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, form_of, note
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest

if TYPE_CHECKING:
    from fsdp_advisor.validation.case import Case, Device
    from fsdp_advisor.validation.launch import Ended
    from fsdp_advisor.validation.records import Record, Rung

FAILED = 3


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(ReportOptions):
    """Options of `validate` apart from those of the job."""

    rung: Annotated[
        Literal["simulate", "stand-in", "measure"] | None,
        Rule(
            about="how close the run is to a real one; simulate: no GPU; stand-in: one GPU plays rank 0; measure: real ranks",
            group="Validation",
            default="the best for this machine",
        ),
    ] = None
    device: Annotated[
        Literal["cuda", "cpu"] | None,
        Rule(
            about="the device of the ranks; cpu: real ranks over gloo, counting live bytes",
            group="Validation",
            default="cuda",
        ),
    ] = None
    campaign: Annotated[
        str | None,
        Rule(
            about="run many cases: quick, full or a file; options of the job replace those of the cases",
            group="Validation",
            metavar="NAME",
        ),
    ] = None
    records: Annotated[
        Path | None,
        Rule(
            about="append one JSON line per case; a campaign continues where FILE ends",
            group="Validation",
            metavar="FILE",
        ),
    ] = None
    snapshot: Annotated[
        Path | None,
        Rule(
            about="write PyTorch's memory history for pytorch.org/memory_viz (needs a GPU; steps are not timed)",
            group="Validation",
            metavar="FILE",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        Rule(
            about="end a case after this time",
            group="Validation",
            metavar="SECONDS",
            ge=1,
            default="600, stand-in 300, measure 1800",
        ),
    ] = None
    zero1: Annotated[
        Literal["deepspeed", "torch"],
        Rule(about="the implementation of ZeRO-1; torch is its ZeroRedundancyOptimizer", group="Validation"),
    ] = "deepspeed"
    rdzv_endpoint: Annotated[
        str | None,
        Rule(
            about="the rendezvous of several nodes; run the same command on each node",
            group="Validation",
            metavar="HOST:PORT",
        ),
    ] = None
    sbatch: Annotated[bool, Rule(about="print a batch script for Slurm and run nothing", group="Validation")] = False


@dataclass(frozen=True, kw_only=True)
class RecordsOptions(ReportOptions):
    """Options of `validate report`."""

    path: Annotated[Path | None, Rule(about="a file written by --records", metavar="FILE", positional=True)] = None
    plot: Annotated[
        Path | None,
        Rule(about="also draw predicted against measured figures as SVG, and the timeline of one case", metavar="FILE"),
    ] = None


def validate(given: dict[str, Any], options: ValidateOptions) -> int:
    """Run the job and compare the result with the estimate; `validate report FILE` sums up records.

    Exit status: 0 if a case fits; 1 if none fits; 2 for bad usage or a rung that this machine cannot run; 3 for a run that
    failed.
    """
    rung, device, records, snapshot, timeout = (
        options.rung, options.device, options.records, options.snapshot, options.timeout,
    )  # fmt: skip
    zero1, rdzv_endpoint, sbatch, quiet = options.zero1, options.rdzv_endpoint, options.sbatch, options.quiet
    campaign = options.campaign
    form = form_of(options.format, options.json)
    destination = Destination(path=options.output, force=options.force)
    destination.check()
    if records is not None:
        from fsdp_advisor.validation.records import check

        check(records)
    if campaign is not None:
        if records is None:
            raise UsageError("a campaign needs --records FILE", hint="what is there already is not run again")
        for name, value in (("--snapshot", snapshot), ("--rdzv-endpoint", rdzv_endpoint), ("--sbatch", sbatch or None)):
            if value is not None:
                raise UsageError(f"{name} is of one case", hint="leave --campaign out")
        return _campaign(campaign, given, rung, device, records, timeout, destination, form, quiet, zero1=zero1)
    if "model" not in given:
        raise UsageError(
            "nothing to validate", hint="give --model and --gpus, or --campaign quick, or: validate report FILE"
        )
    request = make_request(given)
    if sbatch:
        from fsdp_advisor.validation.sbatch import sbatch_example

        run_options: dict[str, Any] = {"device": device, "zero1": None if zero1 == "deepspeed" else zero1}
        run_options |= {"timeout": timeout, "snapshot": snapshot, "records": records}
        destination.write(sbatch_example(request, **run_options))
        return FITS
    cases = _cases([request], rung, device, timeout, quiet, snapshot=snapshot, zero1=zero1, rdzv_endpoint=rdzv_endpoint)
    if snapshot is not None and len(cases) > 1:
        raise UsageError("--snapshot is of one case", hint="give one --strategy")
    run = _run if _started_rank(rdzv_endpoint) is None else _as_rank
    return run(cases, records, destination, form, quiet)


def _cases(
    requests: list[EstimateRequest], rung: Rung | None, device: Device | None, timeout: float | None, quiet: bool, **options: Any
) -> list[Case]:  # fmt: skip
    """One case per strategy of each request, on the rung asked for or the best; notes say which."""
    from fsdp_advisor.job.plan import plans
    from fsdp_advisor.model.resolve import is_count
    from fsdp_advisor.validation import ladder, machine
    from fsdp_advisor.validation.case import TIMEOUT_SECONDS, Case

    for request in requests:
        if is_count(request.model):
            raise UsageError(
                f"{request.model} is a bare parameter count: it cannot be run", hint="name a model or its config.json"
            )
    machine.require_torch()
    rank = _started_rank(options.get("rdzv_endpoint"))
    ranks = rank is not None or options.get("rdzv_endpoint") is not None
    cases: list[Case] = []
    reported: set[str] = set()
    for request in requests:
        for one in ladder.single(request, request.seq_len or 1):
            (plan,) = plans(one, seq_len=1)
            choice = ladder.choose(plan, rung, device, ranks=ranks)
            if choice.why not in reported and len(reported) < 3:
                reported.add(choice.why)
                note(f"rung: {choice.why}", quiet=quiet or bool(rank))
            seconds = timeout or TIMEOUT_SECONDS[choice.rung]
            cases.append(Case(request=one, rung=choice.rung, device=choice.device, timeout_seconds=seconds, **options))
    return cases


def _started_rank(endpoint: str | None) -> int | None:
    """This process's rank where the user has started several; with a place to meet, srun starts one process per node."""
    from fsdp_advisor.validation.started import started_rank

    started = started_rank()
    if started is not None and endpoint is not None and "RANK" in os.environ:
        raise UsageError("--rdzv-endpoint contradicts the ranks that torchrun has started", hint="give it to torchrun")
    return started[0] if started is not None and endpoint is None else None


def _run(cases: list[Case], path: Path | None, destination: Destination, form: str, quiet: bool) -> int:
    """Each case once; a single one that fails is an error. On a node without rank 0 there is nothing to keep or to show."""
    found: list[tuple[Record, Ended]] = []
    status = FITS
    for number, case in enumerate(cases, 1):
        if len(cases) > 1:
            what = f"{case.request.strategy} {case.request.backend} {case.request.offload}"
            note(f"{number}/{len(cases)} {what}", quiet=quiet)
        record, ended = _one(case, alone=len(cases) == 1)
        if not ended.elsewhere:
            found.append((record, ended))
            _keep(path, record)
        elif ended.outcome == "interrupted":
            raise KeyboardInterrupt
        elif ended.outcome not in ("ok", "oom"):
            raise ended.error()
        else:
            note(f"{ended.outcome}: rank 0 is on another node, which has the record", quiet=quiet)
            status = max(status, NONE_FITS if ended.outcome == "oom" else FITS)
    return _show(found, destination, form, quiet) if found else status


def _as_rank(cases: list[Case], path: Path | None, destination: Destination, form: str, quiet: bool) -> int:
    """One case on ranks that the user has started, of which this process is one: rank 0 keeps and shows it."""
    from fsdp_advisor.cli import complain
    from fsdp_advisor.validation.started import as_rank

    if len(cases) > 1:
        raise UsageError(
            f"{len(cases)} cases, and ranks that are started by hand run one: the next needs fresh processes",
            hint="give one --strategy; all of them: without torchrun and srun, on several nodes with --rdzv-endpoint",
        )

    def leave(record: Record | None, ended: Ended) -> int:
        """Where a rank has failed, which every rank's process then ends by."""
        try:
            if record is not None:
                _keep(path, record)
                return _show([(record, ended)], destination, form, quiet)
            if ended.outcome == "interrupted":
                raise KeyboardInterrupt
            if ended.outcome == "oom":
                note(f"{ended.message} Rank 0 has the record", quiet=quiet)
                return NONE_FITS
            raise ended.error()
        except (AdvisorError, KeyboardInterrupt) as error:
            return complain(error)

    (case,) = cases
    if (ours := as_rank(case, leave)) is None:
        return FITS
    _keep(path, ours[0])
    return _show([ours], destination, form, quiet)


def _keep(path: Path | None, record: Record) -> None:
    from fsdp_advisor.validation import records

    if path is not None:
        records.append(path, record)
    if record.outcome == "interrupted":
        raise KeyboardInterrupt


def _show(found: list[tuple[Record, Ended]], destination: Destination, form: str, quiet: bool) -> int:
    from fsdp_advisor.validation import report

    if len(found) == 1 and found[0][0].outcome not in ("ok", "oom"):
        raise found[0][1].error()
    made = [record for record, _ in found]
    destination.write(report.render_case(made[0], form) if len(made) == 1 else report.render(made, form))
    for record in made:
        for warning in record.predicted.get("warnings", []):
            note(warning, quiet=quiet)
    return _status(made)


def _one(case: Case, *, alone: bool) -> tuple[Record, Ended]:
    """A case's record; among several, one that this machine cannot run says why in its place."""
    from fsdp_advisor.validation import launch, worker

    try:
        return worker.run(case)
    except AdvisorError as error:
        if alone:
            raise
        ended = launch.Ended(**launch.failure_of(error))
        return worker.record_of(case, ended), ended


def _status(made: list[Record]) -> int:
    if any(record.fits_really for record in made):
        return FITS
    return NONE_FITS if any(record.fits_really is False for record in made) else FAILED


def _campaign(
    name: str, given: dict[str, Any], rung: Rung | None, device: Device | None, path: Path,
    timeout: float | None, destination: Destination, form: str, quiet: bool, **options: Any,
) -> int:  # fmt: skip
    from fsdp_advisor.cli.progress import Progress
    from fsdp_advisor.validation import campaign, records, report

    if _started_rank(None) is not None:
        raise UsageError(
            "a campaign starts its own ranks, and torchrun or srun has started some", hint="run it in one process"
        )
    cases = _cases(campaign.load(name, **given), rung, device, timeout, quiet, **options)
    with Progress(quiet) as progress:
        for event in campaign.run(cases, path, lambda case: _one(case, alone=False)[0]):
            progress.show(event)
    made, notes = records.read(path)
    for remark in notes:
        note(remark, quiet=quiet)
    destination.write(report.render(report.latest(made), form))
    return FITS if any(record.outcome in ("ok", "oom") for record in made) else FAILED


def report(options: RecordsOptions) -> int:
    """Sum up records: every case, the errors by rung, strategy and figure, and the verdicts."""
    from fsdp_advisor.validation import drawing, records
    from fsdp_advisor.validation import report as summary

    path, plot, quiet = options.path, options.plot, options.quiet
    if path is None:
        raise UsageError("FILE is missing", hint="name a file that --records has written")
    form = form_of(options.format, options.json)
    destination = Destination(path=options.output, force=options.force)
    destination.check()
    made, notes = records.read(path)
    if notes and not made:
        raise UsageError(notes[0].removesuffix("; skipped"), hint="name a file that --records has written")
    for remark in notes:
        note(remark, quiet=quiet)
    made = summary.latest(made)
    if plot is not None:
        drawing.draw(made, plot)
    destination.write(summary.render(made, form))
    return FITS
