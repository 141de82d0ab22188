"""`fsdp-advisor validate`: run a job or a campaign and compare it with its prediction. `validate report` sums up records."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fsdp_advisor.cli.options import (
    ForceOption,
    FormatOption,
    JsonOption,
    OutputOption,
    QuietOption,
    takes_request,
)
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, Format, form_of, note
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.request import EstimateRequest, fields_of

if TYPE_CHECKING:
    from fsdp_advisor.validation.case import Case, Device
    from fsdp_advisor.validation.records import Mode, Record
    from fsdp_advisor.validation.run_result import RunResult

FAILED = 3
"""Exit status of a run that failed."""


class ModeName(str, Enum):
    """How close the run is to a real one."""

    simulate = "simulate"
    stand_in = "stand-in"
    measure = "measure"


class DeviceName(str, Enum):
    """Where ranks run."""

    cuda = "cuda"
    cpu = "cpu"


class Zero1Name(str, Enum):
    """The implementation of ZeRO-1."""

    deepspeed = "deepspeed"
    torch = "torch"


RungOption = Annotated[ModeName | None, typer.Option("--rung", hidden=True)]
"""The former name of --mode."""
PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.svg", help="Also draw predicted against measured figures, and the timeline of one case."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """The options of `validate` besides those of the job. Typer reads the fields."""

    mode: Annotated[
        ModeName | None,
        typer.Option(
            help="simulate: no GPU; stand-in: one GPU plays rank 0; measure: real ranks. [default: the best for this machine]",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        DeviceName | None,
        typer.Option(help="cpu: real ranks over gloo, counting live bytes. [default: cuda]", show_default=False),
    ] = None
    campaign: Annotated[
        str | None,
        typer.Option(metavar="quick|full|FILE", help="Run many cases; options of the job replace those of the cases."),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append one JSON line per case; a campaign continues where FILE ends."),
    ] = None
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write PyTorch's memory history for pytorch.org/memory_viz (needs a GPU; steps are not timed).",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=1, help="End a case after this time. [default: 600, stand-in 300, measure 1800]"
        ),
    ] = None
    zero1: Annotated[
        Zero1Name, typer.Option(help="The implementation of ZeRO-1; torch is its ZeroRedundancyOptimizer.")
    ] = Zero1Name.deepspeed
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The rendezvous of several nodes; run the same command on each node."),
    ] = None
    sbatch: Annotated[bool, typer.Option("--sbatch", help="Print a batch script for Slurm and run nothing.")] = False
    format: FormatOption = Format.text
    json: JsonOption = False
    output: OutputOption = None
    force: ForceOption = False
    quiet: QuietOption = False

    @property
    def form(self) -> str:
        return form_of(self.format, self.json).value

    @property
    def destination(self) -> Destination:
        return Destination(path=self.output, force=self.force)

    def check(self) -> None:
        """Raises UsageError, before anything runs, for options that contradict each other and files that cannot be written."""
        _ = self.form
        self.destination.check()
        if self.records is not None:
            from fsdp_advisor.validation.records import check_writable

            check_writable(self.records)
        if self.campaign is None:
            return
        if self.records is None:
            raise UsageError("a campaign needs --records FILE", hint="cases that FILE already has are not run again")
        for name in ("snapshot", "rdzv_endpoint", "sbatch"):
            if getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} takes a single case", hint="omit --campaign")


def register(app: typer.Typer) -> None:
    """Add `validate` and `validate report` to the program."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None, add_completion=False)
    group.callback(help=validate.__doc__)(_typer_command())
    group.command(name="report")(report)
    app.add_typer(group, name="validate")


def _typer_command() -> Callable[..., int]:
    """`validate` with a parameter for each option of the job, all optional, and for each field of ValidateOptions."""

    def identity(request: EstimateRequest) -> EstimateRequest:
        return request

    identity.__annotations__ = {"request": EstimateRequest}
    request_of = takes_request(identity)
    job = [
        p.replace(default=None, annotation=_optional(p.annotation)) if p.default is inspect.Parameter.empty else p
        for p in inspect.signature(request_of).parameters.values()
    ]
    hints = get_type_hints(ValidateOptions, include_extras=True)
    own = [_parameter(f.name, hints[f.name], f.default) for f in fields(ValidateOptions)]
    own += [_parameter("rung", RungOption, None), _parameter("context", typer.Context, inspect.Parameter.empty)]

    def command(*, context: typer.Context, rung: ModeName | None, **values: Any) -> int:
        if context.invoked_subcommand is not None:
            return FITS
        given = {p.name: value for p in job if (value := values.pop(p.name)) is not None}
        options = ValidateOptions(**{**values, "mode": values["mode"] or rung})
        return validate(given, request_of, options)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*job, *own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _optional(annotation: Any) -> Any:
    parts = (annotation.__origin__ | None, *annotation.__metadata__)
    return operator.getitem(Annotated, parts)  # Python 3.10 has no syntax for Annotated[*parts]


def validate(given: dict[str, Any], request_of: Callable[..., EstimateRequest], options: ValidateOptions) -> int:
    """Run the job and compare the result with the prediction; `validate report FILE` sums up records.

    Exit status: 0 a case fits, 1 none fits, 2 bad usage or a mode that this machine cannot run, 3 a run that failed.
    """
    options.check()
    if options.campaign is not None:
        return _run_campaign(options.campaign, given, options)
    if "model" not in given:
        raise UsageError(
            "nothing to validate", hint="give --model and --gpus, or --campaign quick, or: validate report FILE"
        )
    request = request_of(**{**dict.fromkeys(fields_of(EstimateRequest)), **given})
    if options.sbatch:
        options.destination.write(_sbatch(request, options))
        return FITS
    cases = _cases([request], options)
    if options.snapshot is not None and len(cases) > 1:
        raise UsageError("--snapshot takes a single case", hint="give one --strategy")
    return _run_cases(cases, options) if _own_rank(options) is None else _run_as_rank(cases, options)


def _sbatch(request: EstimateRequest, options: ValidateOptions) -> str:
    from fsdp_advisor.validation.sbatch import sbatch_example

    return sbatch_example(
        request,
        device=options.device and options.device.value,
        zero1=None if options.zero1 is Zero1Name.deepspeed else options.zero1.value,
        timeout=options.timeout,
        snapshot=options.snapshot,
        records=options.records,
    )


def _own_rank(options: ValidateOptions) -> int | None:
    """The rank of this process if the user has started several. With --rdzv-endpoint, srun starts one process per node instead."""
    from fsdp_advisor.validation.external_launcher import external_rank

    started = external_rank()
    if started is None:
        return None
    if options.rdzv_endpoint is not None and "RANK" in os.environ:
        raise UsageError("--rdzv-endpoint contradicts the ranks that torchrun has started", hint="give it to torchrun")
    return started[0] if options.rdzv_endpoint is None else None


def _cases(requests: list[EstimateRequest], options: ValidateOptions) -> list[Case]:
    """One case per strategy of each request, in the requested or the best mode. Up to three notes say why."""
    from fsdp_advisor.job.plan import plans
    from fsdp_advisor.model.resolve import is_count
    from fsdp_advisor.validation import machine, modes
    from fsdp_advisor.validation.case import Case

    for request in requests:
        if is_count(request.model):
            raise UsageError(
                f"{request.model} is a bare parameter count: it cannot be run", hint="name a model or its config.json"
            )
    machine.require_torch()
    rank = _own_rank(options)
    mode: Mode | None = options.mode.value if options.mode else None
    device: Device | None = options.device.value if options.device else None
    several_processes = rank is not None or options.rdzv_endpoint is not None
    cases: list[Case] = []
    reasons: set[str] = set()
    for request in (one for r in requests for one in modes.one_request_per_strategy(r, r.seq_len or 1)):
        (plan,) = plans(request, seq_len=1)
        choice = modes.choose_mode(plan, mode, device, several_processes=several_processes)
        if choice.reason not in reasons and len(reasons) < 3:
            reasons.add(choice.reason)
            note(f"mode: {choice.reason}", quiet=options.quiet or bool(rank))
        case = Case(
            request=request,
            mode=choice.mode,
            device=choice.device,
            timeout_seconds=options.timeout,
            snapshot=options.snapshot,
            zero1=options.zero1.value,
            rdzv_endpoint=options.rdzv_endpoint,
        )
        cases.append(case)
    return cases


def _run_cases(cases: list[Case], options: ValidateOptions) -> int:
    """Run each case once and show the records. The failure of a single case is an error."""
    from fsdp_advisor.validation import worker

    single = len(cases) == 1
    found: list[tuple[Record, RunResult]] = []
    status = FITS
    for number, case in enumerate(cases, 1):
        if not single:
            what = f"{case.request.strategy} {case.request.backend} {case.request.offload}"
            note(f"{number}/{len(cases)} {what}", quiet=options.quiet)
        record, result = worker.run(case) if single else worker.run_or_record_error(case)
        if result.rank_zero_elsewhere:
            status = max(status, _status_elsewhere(result, options))
        else:
            _append(record, options)
            found.append((record, result))
    if not found:
        return status
    return _show_single(*found[0], options) if single else _show([record for record, _ in found], options)


def _run_as_rank(cases: list[Case], options: ValidateOptions) -> int:
    """Run one case on the ranks that the user has started. Rank 0 appends the record and shows it."""
    from fsdp_advisor.cli import complain
    from fsdp_advisor.validation.external_launcher import run_as_rank

    if len(cases) > 1:
        raise UsageError(
            f"{len(cases)} cases, but ranks started by torchrun or srun can run only one",
            hint="give one --strategy; or start it without torchrun and srun, on several nodes with --rdzv-endpoint",
        )

    def on_failure(record: Record | None, result: RunResult) -> int:
        """The exit status after a failure on any rank."""
        try:
            if record is None:
                return _status_elsewhere(result, options)
            _append(record, options)
            return _show_single(record, result, options)
        except (AdvisorError, KeyboardInterrupt) as error:
            return complain(error)

    found = run_as_rank(cases[0], on_failure)
    if found is None:
        return FITS
    _append(found[0], options)
    return _show_single(*found, options)


def _status_elsewhere(result: RunResult, options: ValidateOptions) -> int:
    """The exit status of a process that has no record, because rank 0 runs on another node. Raises for failed runs."""
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    if result.outcome not in ("ok", "oom"):
        raise result.to_error()
    message = " ".join(filter(None, (result.message, "Rank 0 has the record")))
    note(f"{result.outcome}: {message}", quiet=options.quiet)
    return NONE_FITS if result.outcome == "oom" else FITS


def _append(record: Record, options: ValidateOptions) -> None:
    """Append the record to --records. Raises KeyboardInterrupt if Ctrl-C ended its case."""
    from fsdp_advisor.validation import records

    if options.records is not None:
        records.append(options.records, record)
    if record.outcome == "interrupted":
        raise KeyboardInterrupt


def _show_single(record: Record, result: RunResult, options: ValidateOptions) -> int:
    if record.outcome not in ("ok", "oom"):
        raise result.to_error()
    return _show([record], options)


def _show(records: list[Record], options: ValidateOptions) -> int:
    """Write the records, and the warnings of their predictions as notes. Returns the exit status."""
    from fsdp_advisor.validation import report_text

    single = len(records) == 1
    form = options.form
    options.destination.write(
        report_text.render_case(records[0], form) if single else report_text.render(records, form)
    )
    for record in records:
        for warning in record.predicted.get("warnings", []):
            note(warning, quiet=options.quiet)
    if any(record.fits_really for record in records):
        return FITS
    return NONE_FITS if any(record.fits_really is False for record in records) else FAILED


def _run_campaign(name: str, given: dict[str, Any], options: ValidateOptions) -> int:
    from fsdp_advisor.cli.progress import Progress
    from fsdp_advisor.validation import campaign
    from fsdp_advisor.validation.worker import run_or_record_error

    path = options.records
    assert path is not None
    if _own_rank(options) is not None:
        raise UsageError(
            "a campaign starts its own ranks, but torchrun or srun has started several processes",
            hint="start it without torchrun and srun",
        )
    cases = _cases(campaign.load(name, **given), options)
    with Progress(options.quiet) as progress:
        for event in campaign.run(cases, path, lambda case: run_or_record_error(case)[0]):
            progress.show(event)
    records = _summarize(path, options.destination, options.form, options.quiet)
    return FITS if any(record.outcome in ("ok", "oom") for record in records) else FAILED


def _summarize(path: Path, destination: Destination, form: str, quiet: bool, plot: Path | None = None) -> list[Record]:
    """Write the report over the records of a file. Returns all records."""
    from fsdp_advisor.validation import drawing, records, report_text
    from fsdp_advisor.validation.report import latest

    found, notes = records.read(path)
    if notes and not found:
        raise UsageError(notes[0].removesuffix("; skipped"), hint="name a file that --records has written")
    for remark in notes:
        note(remark, quiet=quiet)
    if plot is not None:
        drawing.draw(latest(found), plot)
    destination.write(report_text.render(latest(found), form))
    return found


def report(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by --records.", show_default=False)],
    format: FormatOption = Format.text,
    json: JsonOption = False,
    plot: PlotOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> int:
    """Sum up records: every case, the errors by mode, strategy and figure, and the verdicts."""
    destination = Destination(path=output, force=force)
    form = form_of(format, json).value
    destination.check()
    _summarize(path, destination, form, quiet, plot)
    return FITS
