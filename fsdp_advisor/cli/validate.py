"""`fsdp-advisor validate`: run a job or a campaign and compare it with its prediction. `validate report` sums up records."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fsdp_advisor.assumptions import DEFAULT_GPU, settled
from fsdp_advisor.cli.options import ConfigFileOptions, ReportOptions
from fsdp_advisor.cli.output import FITS, NONE_FITS, Destination, note
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.fields import Rule, as_words
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation.choices import FAILED, CommandMode, Device

if TYPE_CHECKING:
    from fsdp_advisor.validation.case import Case
    from fsdp_advisor.validation.records import Record
    from fsdp_advisor.validation.run_result import RunResult


_rule = partial(Rule, group="Validation")


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(ConfigFileOptions, ReportOptions):
    """Options of `validate` apart from those of the job."""

    mode: Annotated[
        CommandMode | None,
        _rule(
            "how close the run is to a real one; simulate: fake tensors; rehearse: PyTorch's CUDA build on a simulated GPU; "
            "stand-in: one GPU plays rank 0; measure: real ranks",
            aliases=("rung",),
            default="the best for this machine",
        ),
    ] = None
    device: Annotated[
        Device | None, _rule("the device of the ranks; cpu: real ranks over gloo, counting live bytes", default="cuda")
    ] = None
    campaign: Annotated[
        str | None,
        _rule("run many cases: quick, full or a file; options of the job replace those of the cases", metavar="NAME"),
    ] = None
    records: Annotated[
        Path | None,
        _rule("append one JSON line per case; a campaign continues where FILE ends", metavar="FILE"),
    ] = None
    snapshot: Annotated[
        Path | None,
        _rule(
            "write PyTorch's memory history for pytorch.org/memory_viz (needs a GPU; steps are not timed)",
            metavar="FILE",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        _rule("end a case after this time", metavar="SECONDS", ge=1, default="600, stand-in 300, measure 1800"),
    ] = None
    zero1: Annotated[
        Literal["deepspeed", "torch"], _rule("the implementation of ZeRO-1; torch is its ZeroRedundancyOptimizer")
    ] = "deepspeed"
    rdzv_endpoint: Annotated[
        str | None,
        _rule("the rendezvous of several nodes; run the same command on each node", metavar="HOST:PORT"),
    ] = None
    sbatch: Annotated[bool, _rule("print a batch script for Slurm and run nothing")] = False

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


@dataclass(frozen=True, kw_only=True)
class RecordsOptions(ReportOptions):
    """Options of `validate report`."""

    path: Annotated[Path | None, Rule(about="a file written by --records", metavar="FILE", positional=True)] = None
    plot: Annotated[
        Path | None,
        Rule(about="also draw predicted against measured figures as SVG, and the timeline of one case", metavar="FILE"),
    ] = None


def validate(given: dict[str, Any], options: ValidateOptions) -> int:
    """Run the job and compare the result with the prediction; `validate report FILE` sums up records.

    Exit status: 0 a case fits, 1 none fits, 2 bad usage or a mode that this machine cannot run, 3 a run that failed.
    """
    options.check()
    if options.mode == "rehearse":
        return _rehearsed(given, options)
    if options.campaign is not None:
        return _run_campaign(options.campaign, given, options)
    if "model" not in given:
        raise UsageError(
            "nothing to validate", hint="give --model and --gpus, or --campaign quick, or: validate report FILE"
        )
    request = divided(settled(make_request(given)))
    if options.sbatch:
        options.destination.write(_sbatch(request, options))
        return FITS
    cases = _cases([request], options)
    if options.snapshot is not None and len(cases) > 1:
        raise UsageError("--snapshot takes a single case", hint="give one --strategy")
    return _run_cases(cases, options) if _own_rank(options) is None else _run_as_rank(cases, options)


def _rehearsed(given: dict[str, Any], options: ValidateOptions) -> int:
    """Run this command again in stand-in mode, in a process with a simulated GPU. Returns its exit status."""
    from fsdp_advisor.hardware.lookup import find_gpu
    from fsdp_advisor.rehearsal.environment import environment

    variables = environment(Path(sys.executable), find_gpu(_gpu_to_simulate(given, options)), gpus_per_node=1)
    own = {field.name: getattr(options, field.name) for field in fields(options)} | {"mode": "stand-in"}
    job = {name: value for name, value in given.items() if name != "gpu"}  # the attached GPU is the simulated one
    words = [word for name, value in (job | own).items() for word in as_words(name, value)]
    return subprocess.run([sys.executable, "-m", "fsdp_advisor", "validate", *words], env=variables).returncode


def _gpu_to_simulate(given: dict[str, Any], options: ValidateOptions) -> str:
    """The name of the GPU that the option or the cases of a campaign name. Raises UsageError if they name several."""
    from fsdp_advisor.validation import campaign

    if "gpu" in given or options.campaign is None:
        return str(given.get("gpu") or DEFAULT_GPU)
    names = sorted({request.gpu or DEFAULT_GPU for request in campaign.load(options.campaign, **given)})
    if len(names) > 1:
        raise UsageError(
            f"the cases of {options.campaign} name several GPUs: {', '.join(names)}",
            hint="a rehearsal simulates one: give --gpu, or a campaign for each",
        )
    return names[0]


def _sbatch(request: EstimateRequest, options: ValidateOptions) -> str:
    from fsdp_advisor.validation.sbatch import sbatch_example

    return sbatch_example(
        request,
        device=options.device,
        zero1=None if options.zero1 == "deepspeed" else options.zero1,
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
    from fsdp_advisor.job.compatibility import plans
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
    mode = None if options.mode == "rehearse" else options.mode
    device: Device | None = options.device if options.device else None
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
            zero1=options.zero1,
            rdzv_endpoint=options.rdzv_endpoint,
        )
        cases.append(case)
    return cases


def _run_cases(cases: list[Case], options: ValidateOptions) -> int:
    """Run each case once, keep and show its record, and return the exit status. If there is only one case, its error is raised;
    otherwise errors are in the records.
    """
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


def report(options: RecordsOptions) -> int:
    """Sum up records: every case, the errors by mode, strategy and figure, and the verdicts."""
    if options.path is None:
        raise UsageError("FILE is missing", hint="name a file that --records has written")
    form, destination = options.form, options.destination
    destination.check()
    _summarize(options.path, destination, form, options.quiet, options.plot)
    return FITS
