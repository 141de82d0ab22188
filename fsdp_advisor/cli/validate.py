"""`fsdp-advisor validate`: run a job, or a campaign of them, on the best rung there is; `validate report` reads the records."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

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
    from fsdp_advisor.validation.child_process import Ended
    from fsdp_advisor.validation.records import Record, Rung

FAILED = 3


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
    form = form_of(format, json).value
    destination = Destination(path=output, force=force)
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
        return _campaign(campaign, given, rung, device, records, timeout, destination, form, quiet, zero1=zero1.value)
    if "model" not in given:
        raise UsageError(
            "nothing to validate", hint="give --model and --gpus, or --campaign quick, or: validate report FILE"
        )
    request = ask(**{**dict.fromkeys(fields_of(EstimateRequest)), **given})
    if sbatch:
        from fsdp_advisor.validation.sbatch import sbatch_example

        options = {
            "device": device and device.value,
            "zero1": zero1.value if zero1 is not Zero1Name.deepspeed else None,
        }
        options |= {"timeout": timeout, "snapshot": snapshot, "records": records}
        destination.write(sbatch_example(request, **options))
        return FITS
    cases = _cases(
        [request], rung, device, timeout, quiet, snapshot=snapshot, zero1=zero1.value, rdzv_endpoint=rdzv_endpoint
    )
    if snapshot is not None and len(cases) > 1:
        raise UsageError("--snapshot is of one case", hint="give one --strategy")
    run = _run if _started_rank(rdzv_endpoint) is None else _as_rank
    return run(cases, records, destination, form, quiet)


def _cases(
    requests: list[EstimateRequest], rung: RungName | None, device: DeviceName | None, timeout: float | None, quiet: bool, **options: Any
) -> list[Case]:  # fmt: skip
    """One case per strategy of each request, on the rung asked for or the best; notes say which."""
    from fsdp_advisor.job.plan import plans
    from fsdp_advisor.model.resolve import is_count
    from fsdp_advisor.validation import machine, modes
    from fsdp_advisor.validation.case import TIMEOUT_SECONDS, Case

    for request in requests:
        if is_count(request.model):
            raise UsageError(
                f"{request.model} is a bare parameter count: it cannot be run", hint="name a model or its config.json"
            )
    machine.require_torch()
    rank = _started_rank(options.get("rdzv_endpoint"))
    ranks = rank is not None or options.get("rdzv_endpoint") is not None
    wanted: Rung | None = rung.value if rung else None
    where: Device | None = device.value if device else None
    cases: list[Case] = []
    reported: set[str] = set()
    for request in requests:
        for one in modes.single(request, request.seq_len or 1):
            (plan,) = plans(one, seq_len=1)
            choice = modes.choose(plan, wanted, where, ranks=ranks)
            if choice.why not in reported and len(reported) < 3:
                reported.add(choice.why)
                note(f"rung: {choice.why}", quiet=quiet or bool(rank))
            seconds = timeout or TIMEOUT_SECONDS[choice.rung]
            cases.append(Case(request=one, rung=choice.rung, device=choice.device, timeout_seconds=seconds, **options))
    return cases


def _started_rank(endpoint: str | None) -> int | None:
    """This process's rank where the user has started several; with a place to meet, srun starts one process per node."""
    from fsdp_advisor.validation.external_launcher import started_rank

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
    from fsdp_advisor.validation.external_launcher import as_rank

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
    from fsdp_advisor.validation import child_process, worker

    try:
        return worker.run(case)
    except AdvisorError as error:
        if alone:
            raise
        ended = child_process.Ended(**child_process.failure_of(error))
        return worker.record_of(case, ended), ended


def _status(made: list[Record]) -> int:
    if any(record.fits_really for record in made):
        return FITS
    return NONE_FITS if any(record.fits_really is False for record in made) else FAILED


def _campaign(
    name: str, given: dict[str, Any], rung: RungName | None, device: DeviceName | None, path: Path,
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

    form = form_of(format, json).value
    destination = Destination(path=output, force=force)
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
