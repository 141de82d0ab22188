"""The estimate of the job that was diagnosed, and the differences of the measured memory from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.assumptions import gpu_of, settled
from fsdp_advisor.comparison import UNSHARDED, best_row, runs_as_ddp
from fsdp_advisor.diagnosis.facts import Category, Difference, Holding, Moment, OutOfMemory, Prediction
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.hardware import list_gpus
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.live import step_moments
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.program.accounts import ACCOUNTS, Phase
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tapes import kept_gpu_tape, row_tape
from fsdp_advisor.units import GIB, format_gib, format_gpus

_SMALL_SHARE = 0.01
"""Differences below this share of the larger total (rounding, workspaces) are not reported."""
_NAMED_HOLDINGS = 3
_SAME_GPU = 0.05
"""GPUs of one model differ by less than this share of their memory in what the driver keeps."""
_PHASES: Mapping[str, Phase] = {
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
RISING = ("activations", "loss", "temporaries", "allocated")
"""Categories that grow within a moment."""
_NOT_COMPARED = ("free", "other_processes", "outside")
_LOGITS_BYTES = (2, 4)
"""Bytes of one logit: bf16 or fp16, and fp32."""
_ROUNDED = 0.005
"""The largest relative error of a size of at least 1.00 with two decimals, as PyTorch's message has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedJob:
    """The job as it was meant to run, with its estimate. `row`: of the requested strategy; if none was requested, the best row."""

    request: EstimateRequest
    model: Resolved
    report: Report
    row: StrategyEstimate

    @property
    def plan(self) -> Plan:
        return self.row.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed for a strategy that neither the files nor an option name."""
        return (UNSHARDED,) if runs_as_ddp(self.request) else ()

    @property
    def label(self) -> str:
        plan = self.plan
        return (
            f"{self.report.model_name}, {self.row.label} ({plan.backend}), {plan.world_size} x {self.report.gpu_name}, "
            f"micro-batch {plan.micro_batch_size}, {plan.seq_len} tokens"
        )


def job_of(request: EstimateRequest, model: Resolved | None = None) -> DiagnosedJob:
    """The job of a request, whose model may be found already. Raises the errors of `estimate`."""
    request, model = settled(request), model or resolve(request.model)
    report = estimate_resolved(request, model)
    return DiagnosedJob(request=request, model=model, report=report, row=best_row(report))


def on_gpu_of_error(job: DiagnosedJob, error: OutOfMemory) -> DiagnosedJob:
    """The job on a GPU with the memory in the error, if its request names no GPU and the assumed one has other memory."""
    total = error.total_bytes
    if total is None or job.request.gpu is not None or _is_same_gpu(total, job.report.gpu_memory_bytes):
        return job
    same = [gpu.name for gpu in list_gpus() if format_gib(gpu.memory_bytes) == format_gib(total)]
    return job_of(job.request.but(gpu=same[0] if len(same) == 1 else f"{total / GIB:.2f}GiB"), job.model)


def _is_same_gpu(measured_bytes: int, gpu_bytes: int) -> bool:
    return abs(measured_bytes - gpu_bytes) <= _SAME_GPU * gpu_bytes


def predicted(
    job: DiagnosedJob,
    moment: Moment,
    memory: Mapping[Category, int],
    holdings: Sequence[Holding],
    error: OutOfMemory | None = None,
) -> Prediction:
    """The prediction for the moment of the diagnosis, and the differences from what was measured. `error` is the error that
    was diagnosed, if there is one.
    """
    row = job.row
    at_moment, name = _at_moment(job, moment)
    differences = tuple(_differences(at_moment, moment, memory, holdings, error)) if at_moment else ()
    return Prediction(
        job=job.label,
        fits=row.fits,
        needed_bytes=row.needed_bytes,
        peak_at=f"{row.peak_phase}, {row.peak_where}" if row.peak_phase else None,
        at_moment=at_moment,
        moment=name,
        differences=differences,
        notes=(*_contradictions(job, error), *_notes(job, moment, holdings)),
    )


def _at_moment(job: DiagnosedJob, moment: Moment) -> tuple[dict[Category, int], str]:
    """Predicted bytes by category at a moment, and the moment in words; empty if the job has no step."""
    model = job.model.adapted(adaptation_of(job.request))
    breakdown, profile = job.row.needed_breakdown, model.profile
    if breakdown is None or profile is None:
        return {}, "unknown"
    outside = {name: n for name, n in breakdown.items() if name not in (*ACCOUNTS, "loading_or_saving", "evaluation")}
    phase = _PHASES.get(moment.phase)
    if phase is None:
        return {**{name: breakdown[name] for name in ACCOUNTS}, **outside}, "the peak of the step"
    plan = job.plan
    gpu, *_ = gpu_of(job.request)
    tape = kept_gpu_tape(profile, row_tape(model, plan, gpu), plan, gpu)
    moments = step_moments(step_program(profile, tape, plan), *plan.tape_shape, phase)
    number = _visit(moment, len(moments))
    if number is None:
        accounts = max((read() for read in moments), key=lambda found: sum(found.values()))
        return {**accounts, **outside}, f"the peak of {moment.phase}"
    place = f" of layer {moment.layer}" if moment.layer else ""
    return {**moments[number](), **outside}, f"{moment.phase}{place}"


def _visit(moment: Moment, visits: int) -> int | None:
    """The index of a moment among the visits of its phase: the root, each layer, the root. None if it is not known."""
    if moment.phase == "optimizer":
        return visits - 1
    if moment.phase == "loss":
        return visits - 1
    if moment.layer is None:
        return 0 if moment.phase == "backward" else None
    layers = visits - 2
    if moment.layer > layers or (moment.layers is not None and moment.layers != layers):
        return None
    return moment.layer if moment.phase == "forward" else layers + 1 - moment.layer


def _differences(
    at_moment: Mapping[Category, int],
    moment: Moment,
    memory: Mapping[Category, int],
    holdings: Sequence[Holding],
    error: OutOfMemory | None,
) -> Iterator[Difference]:
    """The categories that differ, the largest difference first."""
    measured = {name: n for name, n in memory.items() if name not in _NOT_COMPARED}
    expected = dict(at_moment)
    if "allocated" in measured:  # only an error message has this category instead of several
        tensors = (*ACCOUNTS, "libraries")
        total = sum(expected.pop(name, 0) for name in tensors)
        expected["allocated"] = total
    else:  # events have requested bytes, without the allocator's rounding
        for found in (measured, expected):
            found["fragmentation"] = found.get("fragmentation", 0) + found.pop("libraries", 0)
    if "cuda_and_nccl" not in measured:
        expected.pop("cuda_and_nccl", None)
    small = _SMALL_SHARE * max(sum(measured.values()), sum(expected.values()))
    differences = [
        Difference(
            category=name,
            measured_bytes=measured.get(name, 0),
            predicted_bytes=expected.get(name, 0),
            because=_because(name, measured.get(name, 0), expected.get(name, 0), moment, error),
            holdings=tuple(holding for holding in holdings if holding.category == name)[:_NAMED_HOLDINGS],
        )
        for name in dict.fromkeys((*expected, *measured))
        if abs(measured.get(name, 0) - expected.get(name, 0)) > small
        and not (name == "fragmentation" and measured.get(name, 0) < expected.get(name, 0))  # it still grows
    ]
    yield from sorted(differences, key=lambda d: -abs(d.measured_bytes - d.predicted_bytes))


def _because(category: Category, measured: int, expected: int, moment: Moment, error: OutOfMemory | None) -> str:
    """A cause that follows from the moment; empty if none does."""
    if category == "optimizer" and not measured and expected and moment.step in (None, 1):
        return "the optimizer makes its state in its first step, so the job will need it in addition"
    if category == "gradients" and measured < expected and moment.phase in ("forward", "loss"):
        return "no gradients are kept from a step before"
    if category in RISING and measured < expected and moment.phase in _PHASES:
        return "the estimate is for the highest point of this moment, which comes later"
    if category in RISING and measured < expected and error is not None:
        return "the job ended at the failed request; the estimate is its peak on a GPU that is large enough"
    if category == "fragmentation":
        return "with libraries and rounding"
    return ""


def _contradictions(job: DiagnosedJob, error: OutOfMemory | None) -> Iterator[str]:
    """Sentences about facts of the error that contradict the estimated job."""
    if error is None:
        return
    plan, gpu_bytes = job.plan, job.report.gpu_memory_bytes
    if error.total_bytes is not None and not _is_same_gpu(error.total_bytes, gpu_bytes):
        yield (
            f"the GPU of the error has {format_gib(error.total_bytes)}, and {job.report.gpu_name} of the estimate has "
            f"{format_gib(gpu_bytes)}: name the GPU of the run"
        )
    if error.rank is not None and error.rank >= plan.world_size:
        ranks = format_gpus(plan.world_size)
        yield f"the error is of rank {error.rank}, and the estimate is for {ranks}: give the number of GPUs of the run"
    elif job.row.fits:
        yield (
            "the job ran out of memory although its estimate fits: check that the configuration, the number of GPUs "
            f"({plan.world_size}), the micro-batch and the length are those of the run"
        )


def _notes(job: DiagnosedJob, moment: Moment, holdings: Sequence[Holding]) -> Iterator[str]:
    if job.request.strategy == "all":
        yield f"the job leaves the strategy open; compared with {job.row.label} ({job.plan.backend})"
    if moment.layers is not None and job.model.profile is not None:
        layers = sum(stack.depth for stack in job.model.profile.stacks)
        if layers != moment.layers:
            yield f"the script ran {moment.layers} layers, but {job.report.model_name} has {layers}: is it the same model?"
    yield from _tokens(job, holdings)


def _tokens(job: DiagnosedJob, holdings: Sequence[Holding]) -> Iterator[str]:
    """A sentence if the logits have another number of tokens than the job's micro-batch."""
    plan, vocabulary = job.plan, _vocabulary(job)
    largest = max((h.largest_bytes for h in holdings if h.category == "loss"), default=0)
    if vocabulary is None:
        return
    expected = plan.micro_batch_size * plan.seq_len
    shifted = expected - plan.micro_batch_size  # some losses have one token fewer per sequence
    found = {largest // (vocabulary * size) for size in _LOGITS_BYTES if largest % (vocabulary * size) == 0} - {0}
    if found and not found & {expected, shifted}:
        tokens = " or ".join(str(n) for n in sorted(found))
        yield (
            f"the largest tensor of the loss has {format_gib(largest)}, which is {tokens} tokens; the job has "
            f"{plan.micro_batch_size} x {plan.seq_len} = {expected} per micro-batch"
        )


def requests_logits(job: DiagnosedJob, error: OutOfMemory | None) -> bool:
    """Whether the failed request has the size of all logits of a micro-batch, to the precision of the error's message."""
    vocabulary = _vocabulary(job)
    if error is None or error.requested_bytes is None or vocabulary is None:
        return False
    plan, requested = job.plan, error.requested_bytes
    tokens = (plan.sequences * plan.seq_len, plan.sequences * (plan.seq_len - 1))
    sizes = [n * vocabulary * size for n in tokens for size in _LOGITS_BYTES]
    return any(abs(requested - size) <= _ROUNDED * size for size in sizes)


def _vocabulary(job: DiagnosedJob) -> int | None:
    """The rows of the language model's head; None if it has none."""
    profile = job.model.profile
    if profile is None:
        return None
    rows = [p.shape[0] for p in profile.root.parameters if len(p.shape) == 2 and p.role in ("embedding", "head")]
    return max(rows, default=None)
