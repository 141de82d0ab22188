"""`fsdp-advisor validate`: run a job, or a campaign of them, on the best rung there is; `validate report` reads the records."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fsdp_advisor.cli.options import (
    ForceOption,
    Format,
    FormatOption,
    JsonOption,
    OutputOption,
    QuietOption,
    takes_request,
)
from fsdp_advisor.cli.output import Destination, note
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.request import EstimateRequest

if TYPE_CHECKING:
    from fsdp_advisor.validation.campaign import Event
    from fsdp_advisor.validation.case import Case, Device
    from fsdp_advisor.validation.launch import Ended
    from fsdp_advisor.validation.records import Record, Rung

FITS, NONE_FITS, FAILED = 0, 1, 3


class RungName(str, Enum):
    """How close to the real thing."""

    simulate = "simulate"
    stand_in = "stand-in"
    measure = "measure"


class DeviceName(str, Enum):
    """Where ranks run."""

    cuda = "cuda"
    cpu = "cpu"


class Zero1Name(str, Enum):
    """Who does ZeRO-1."""

    deepspeed = "deepspeed"
    torch = "torch"


RungOption = Annotated[
    Optional[RungName],  # noqa: UP045  # typer reads this while the module runs
    typer.Option(
        help="simulate: no GPU; stand-in: one GPU plays rank 0; measure: real ranks. [default: the best this machine has]",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    Optional[DeviceName],  # noqa: UP045  # likewise
    typer.Option(help="cpu: real ranks over gloo, live bytes counted. [default: cuda]", show_default=False),
]
CampaignOption = Annotated[
    Optional[str],  # noqa: UP045  # likewise
    typer.Option(metavar="quick|full|FILE", help="Run many cases; options given beside it replace theirs."),
]
RecordsOption = Annotated[
    Optional[Path],  # noqa: UP045  # likewise
    typer.Option(metavar="FILE", help="Append a JSON line per case; a campaign goes on where FILE stops."),
]
SnapshotOption = Annotated[
    Optional[Path],  # noqa: UP045  # likewise
    typer.Option(
        metavar="FILE",
        help="Keep PyTorch's memory history for pytorch.org/memory_viz (needs a GPU; steps are not timed).",
    ),
]
TimeoutOption = Annotated[
    Optional[float],  # noqa: UP045  # likewise
    typer.Option(metavar="SECONDS", min=1, help="End a case after so long. [default: 600, stand-in 300, measure 1800]"),
]
EndpointOption = Annotated[
    Optional[str],  # noqa: UP045  # likewise
    typer.Option(metavar="HOST:PORT", help="Where nodes meet; give the same command on each."),
]
PlotOption = Annotated[
    Optional[Path],  # noqa: UP045  # likewise
    typer.Option(metavar="FILE.svg", help="Also draw predicted against measured, and a case's step from both sides."),
]


def register(app: typer.Typer) -> None:
    """Add `validate` and `validate report` to the program."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None, add_completion=False)
    group.callback(help=validate.__doc__)(_with_request(validate))
    group.command(name="report")(report)
    app.add_typer(group, name="validate")


def _with_request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options of a request, none of them required: a campaign or a report needs no --model."""

    def ask(request: EstimateRequest) -> EstimateRequest:
        return request

    ask.__annotations__ = {"request": EstimateRequest}
    asked = takes_request(ask)
    options = [
        p.replace(default=None, annotation=_optional(p.annotation)) if p.default is inspect.Parameter.empty else p
        for p in inspect.signature(asked).parameters.values()
    ]
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in ("given", "ask")]

    def wrapper(**values: Any) -> Any:
        given = {o.name: v for o in options if (v := values.pop(o.name)) is not None}
        return command(given=given, ask=asked, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*options, *own)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__doc__ = command.__doc__
    return wrapper


def _optional(annotation: Any) -> Any:
    parts = (Optional[annotation.__origin__], *annotation.__metadata__)  # noqa: UP045  # likewise
    return operator.getitem(Annotated, parts)  # Annotated[...] with a star in it, which 3.10 does not take


def validate(
    context: typer.Context,
    rung: RungOption = None,
    device: DeviceOption = None,
    campaign: CampaignOption = None,
    records: RecordsOption = None,
    snapshot: SnapshotOption = None,
    timeout: TimeoutOption = None,
    zero1: Annotated[
        Zero1Name, typer.Option(help="Who does ZeRO-1: torch is its ZeroRedundancyOptimizer.")
    ] = Zero1Name.deepspeed,
    rdzv_endpoint: EndpointOption = None,
    sbatch: Annotated[bool, typer.Option("--sbatch", help="Print a batch script for Slurm, and run nothing.")] = False,
    format: FormatOption = Format.text,
    json: JsonOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    *,
    given: dict[str, Any],
    ask: Callable[..., EstimateRequest],
) -> int:
    """Run the job and show what it takes beside what was predicted; `validate report FILE` sums up records.

    Exit status: 0 a case fits, 1 none fits, 2 bad usage or a rung that this machine has not, 3 a run that failed.
    """
    if context.invoked_subcommand is not None:
        return FITS
    form = _form(format, json)
    destination = Destination(path=output, force=force)
    destination.check()
    if campaign is not None:
        return _campaign(campaign, given, rung, device, records, timeout, destination, form, quiet, snapshot)
    if "model" not in given:
        raise UsageError(
            "nothing to validate", hint="give --model and --gpus, or --campaign quick, or: validate report FILE"
        )
    request = ask(**{**dict.fromkeys(EstimateRequest.model_fields), **given})
    if sbatch:
        from fsdp_advisor.validation.measure import sbatch_example

        destination.write(sbatch_example(request, records=records))
        return FITS
    cases = _cases(
        [request], rung, device, timeout, quiet, snapshot=snapshot, zero1=zero1.value, rdzv_endpoint=rdzv_endpoint
    )
    if snapshot is not None and len(cases) > 1:
        raise UsageError("--snapshot is of one case", hint="give one --strategy")
    return _run(cases, records, destination, form, quiet)


def _form(format: Format, json: bool) -> str:
    if json and format is Format.markdown:
        raise UsageError("--json contradicts --format markdown", hint="give one of them")
    return "json" if json else format.value


def _cases(
    requests: list[EstimateRequest], rung: RungName | None, device: DeviceName | None, timeout: float | None, quiet: bool, **options: Any
) -> list[Case]:  # fmt: skip
    """One case per strategy of each request, on the rung asked for or the best; notes say which."""
    from fsdp_advisor.plan import plans
    from fsdp_advisor.validation import ladder, machine
    from fsdp_advisor.validation.case import TIMEOUT_SECONDS, Case

    machine.require_torch()
    wanted: Rung | None = rung.value if rung else None
    where: Device | None = device.value if device else None
    cases: list[Case] = []
    told: set[str] = set()
    for request in requests:
        for one in ladder.single(request, request.seq_len or 1):
            (plan,) = plans(one, seq_len=1)
            choice = ladder.choose(plan, wanted, where)
            if choice.why not in told and len(told) < 3:
                told.add(choice.why)
                note(f"rung: {choice.why}", quiet=quiet)
            seconds = timeout or TIMEOUT_SECONDS[choice.rung]
            cases.append(Case(request=one, rung=choice.rung, device=choice.device, timeout_seconds=seconds, **options))
    return cases


def _run(cases: list[Case], path: Path | None, destination: Destination, form: str, quiet: bool) -> int:
    """Each case once, on ranks that the user has started or on our own; a single one that fails is an error."""
    from fsdp_advisor.validation import records, report
    from fsdp_advisor.validation.measure import started_rank

    found: list[tuple[Record, Ended]] = []
    for number, case in enumerate(cases, 1):
        if len(cases) > 1:
            note(
                f"{number}/{len(cases)} {case.request.strategy} {case.request.backend} {case.request.offload}",
                quiet=quiet,
            )
        if case.rung == "measure" and started_rank() is not None:
            from fsdp_advisor.validation.rank import as_rank

            if (ours := as_rank(case)) is None:
                continue
        else:
            ours = _one(case, alone=len(cases) == 1)
        found.append(ours)
        if path is not None:
            records.append(path, ours[0])
        if ours[0].outcome == "interrupted":
            raise KeyboardInterrupt
    if not found:  # a rank other than the first
        return FITS
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
    name: str, given: dict[str, Any], rung: RungName | None, device: DeviceName | None, path: Path | None,
    timeout: float | None, destination: Destination, form: str, quiet: bool, snapshot: Path | None,
) -> int:  # fmt: skip
    from fsdp_advisor.validation import campaign, records, report

    if path is None:
        raise UsageError("a campaign needs --records FILE", hint="what is there already is not run again")
    if snapshot is not None:
        raise UsageError("--snapshot is of one case", hint="leave --campaign out")
    cases = _cases(campaign.load(name, **given), rung, device, timeout, quiet)
    with _Progress(quiet) as progress:
        for event in campaign.run(cases, path, lambda case: _one(case, alone=False)[0]):
            progress.show(event)
    made, notes = records.read(path)
    for remark in notes:
        note(remark, quiet=quiet)
    destination.write(report.render(report.latest(made), form))
    return FITS if any(record.outcome in ("ok", "oom") for record in made) else FAILED


class _Progress:
    """A bar with the time left on a terminal, a line per case elsewhere; standard error in both."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Event) -> None:
        from fsdp_advisor.validation.report import main_figure, signed_percent

        said = "starting" if event.done < event.total else "nothing left to do"
        if (record := event.record) is not None:
            figure = main_figure(record)
            error = record.errors.get(figure) if figure else None
            said = f"{record.label}: {record.outcome}" + (f", {signed_percent(error)}" if error is not None else "")
            said += f" ({record.message})" if record.message and record.outcome not in ("ok", "oom") else ""
        if self._bar is None:
            note(f"{event.done}/{event.total} {said}", quiet=self._quiet)
        elif not self._bar.tasks:
            self._bar.add_task(said, total=event.total, completed=event.done)
        else:
            self._bar.update(self._bar.tasks[0].id, completed=event.done, description=said)


def report(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What --records has written.", show_default=False)],
    format: FormatOption = Format.text,
    json: JsonOption = False,
    plot: PlotOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> int:
    """Sum up records: every case, the errors per rung, strategy and figure, and the verdicts."""
    from fsdp_advisor.validation import drawing, records
    from fsdp_advisor.validation import report as summary

    form = _form(format, json)
    destination = Destination(path=output, force=force)
    destination.check()
    made, notes = records.read(path)
    for remark in notes:
        note(remark, quiet=quiet)
    made = summary.latest(made)
    if plot is not None:
        drawing.draw(made, plot)
    destination.write(summary.render(made, form))
    return FITS
