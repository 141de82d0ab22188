"""`AdviceView`: everything that text, the page and the charts show of a recommendation, prepared once.

The only module outside `advice` and `export` that reads the fields of a `Recommendation`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_advisor.advice import Advice, Candidate, Recommendation, Rejection
from fsdp_advisor.advice.cost import Training
from fsdp_advisor.advice.decision_tree import Node
from fsdp_advisor.advice.methods import LORA, QLORA
from fsdp_advisor.advice.result import Method
from fsdp_advisor.advice.rules_of_thumb import RuleOfThumb
from fsdp_advisor.advice.savings import Saving
from fsdp_advisor.advice.search_space import StrategyChoice
from fsdp_advisor.assumption_notes import FP32_AROUND_PACKED
from fsdp_advisor.export import TARGETS, Job
from fsdp_advisor.export.bundle import script_limit, start_command
from fsdp_advisor.job.losses import loss_words
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.resolve import is_count
from fsdp_advisor.model.tasks import Task, task_of
from fsdp_advisor.render.parts import PartBytes, bar_parts
from fsdp_advisor.render.sizes import NONE, UNKNOWN, format_rate
from fsdp_advisor.render.view import model_text, omitted_effects, why_unknown
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_count, format_gib

_FIND_TITLES = {"batch": "micro-batch", "sequence": "sequence length", "gpus": "GPUs", "gpu-type": "GPU"}
PEAK_UNKNOWN = (
    "The peak is unknown, because a parameter count says nothing about activations, logits and gathered units. "
    "Give --model a name or a config.json."
)

CACHE_MARK = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateView:
    """One configuration: a row of a table and a point of a chart. `needed_bytes` has only the states if no peak is known.

    `needed_text` ends in `*` if it exceeds the available memory by cache of the allocator alone, as `cache_note` says.
    """

    plan: Plan
    label: str
    strategy: str
    checkpointing: str
    gpu: str
    allocator_conf: str | None
    fits: bool | None
    chosen: bool
    peak_known: bool
    needed_bytes: int
    throughput: float | None
    needed_text: str
    available_text: str
    throughput_text: str
    time_text: str
    gpu_hours_text: str
    fits_text: str
    why_not: str

    @property
    def batch(self) -> str:
        """Micro-batch and accumulation steps, such as `4 x 2`."""
        return f"{self.plan.micro_batch_size} x {self.plan.gradient_accumulation_steps}"


def cache_note(rows: Iterable[CandidateView]) -> str:
    """What the mark in a table of configurations means; empty if no row has it."""
    available = {row.available_text for row in rows if row.needed_text.endswith(CACHE_MARK)}
    if not available:
        return ""
    enough = f"{available.pop()} GiB are" if len(available) == 1 else "what is available is"
    return f"{CACHE_MARK} with the allocator's cache; {enough} enough with less cache."


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionView:
    """A configuration that is not recommended. `micro_batch_size` and `needed_text` are empty if it was not estimated."""

    label: str
    micro_batch_size: str
    needed_text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyView:
    """A change that makes the job fit, as a command line and as the query of a permalink."""

    reason: str
    command: str
    query: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindView:
    """The answer to `--find`: a row per alternative, and memory against throughput."""

    what: str
    title: str
    answer: str
    rows: tuple[CandidateView, ...]
    frontier: tuple[CandidateView, ...]

    @property
    def listed(self) -> tuple[CandidateView, ...]:
        """The rows of a table: of GPUs those that are large enough, if there are such."""
        fitting = tuple(row for row in self.rows if row.fits is not False)
        return fitting if self.what == "gpu-type" and fitting else self.rows

    @property
    def left_out(self) -> str:
        """A sentence that counts the other GPUs; empty if there are none."""
        number = len(self.rows) - len(self.listed)
        others = "1 other GPU is" if number == 1 else f"{number} other GPUs are"
        return f"{others} too small; --json lists them." if number else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceView:
    """A recommendation as every interface shows it.

    `winner` is None if nothing fits; `remedies` are then changes with which a plan fits. `faster`: a faster plan and why it was not
    chosen; empty if the winner is the fastest. `estimate` is the winner's row. `report` is the job as asked.
    """

    report: Report
    estimate: StrategyEstimate | None

    job: str
    gpu_memory_bytes: int
    throughput_unit: str
    fits: bool | None
    winner: CandidateView | None
    heading: str
    figures: str
    why_not_simpler: str
    faster: str
    parts: PartBytes
    training: str
    warnings: tuple[str, ...]
    not_modelled: str
    methods: tuple[str, ...]
    savings: tuple[str, ...]
    savings_title: str
    remedies: tuple[RemedyView, ...]
    path: tuple[Node, ...]
    tree: tuple[Node, ...]
    found: FindView | None
    runners_up: tuple[CandidateView, ...]
    rejected: tuple[RejectionView, ...]
    configurations: int
    usable_memory: str
    rules: tuple[RuleOfThumb, ...]
    launch_title: str
    launch_commands: tuple[str, ...]
    other_targets: tuple[str, ...]
    notes: tuple[str, ...]


def advice_view(advice: Advice) -> AdviceView:
    """The view of a recommendation."""
    r = advice.recommendation
    task = task_of(advice.report.task)
    winner = None if r.winner is None else _candidate(r, task, r.winner)
    commands, targets = _launch(advice)
    return AdviceView(
        report=advice.report,
        estimate=r.estimate,
        job=_job_line(advice),
        gpu_memory_bytes=r.gpu_memory_bytes,
        throughput_unit=f"{task.counted}/s",
        fits=r.fits,
        winner=winner,
        heading=_heading(r),
        figures=_figures(r, task),
        why_not_simpler=r.why_not_simpler or "",
        faster=f"{r.faster.candidate.label}: {r.faster.why_not}" if r.faster else "",
        parts=bar_parts(r.estimate) if r.estimate is not None else (),
        training=_training(r),
        warnings=(*r.warnings, *(r.estimate.warnings if r.estimate is not None else ())),
        not_modelled=_not_modelled(r.estimate),
        methods=(
            *(_method(method, task) for method in r.methods),
            *([r.why_method] if r.why_method else []),
            *_why_qlora_needs_more(r.methods),
            *_other_methods(r.methods),
        ),
        savings=tuple(map(_saving, r.savings)),
        savings_title=f"What saves memory at micro-batch {winner.plan.micro_batch_size}" if winner else "",
        remedies=tuple(
            RemedyView(
                reason=remedy.because,
                command=remedy.command,
                query=r.request.changed | dict(remedy.options),
            )
            for remedy in r.remedies
        ),
        path=r.tree.path,
        tree=r.tree.nodes,
        found=_found(r, task),
        runners_up=tuple(_candidate(r, task, other.candidate, other.why_not) for other in r.runners_up),
        rejected=tuple(map(_rejection, r.rejected)),
        configurations=r.configurations,
        usable_memory=f"{100 * (1 - r.request.margin):g} % of the memory",
        rules=r.rules,
        launch_title="To launch it" if r.fits else "To try it",
        launch_commands=commands,
        other_targets=targets,
        notes=r.notes,
    )


def _not_modelled(estimate: StrategyEstimate | None) -> str:
    """The effects that the figures of the recommended plan lack; empty if there are none."""
    effects = omitted_effects(estimate) if estimate is not None else []
    return f"Not modelled: {'; '.join(effects)}." if effects else ""


def _saving(saving: Saving) -> str:
    """One line about an activation choice: the memory that it saves, and its cost in speed."""
    name = " and ".join(saving.activations.parts)
    if saving.is_bound:
        return f"{name}: at most {format_gib(saving.saved_bytes)} of tensors; its step is not recorded"
    text = f"{name}: {format_gib(saving.saved_bytes)} of tensors"
    if (speed := saving.relative_speed) is not None:
        text += f", {abs(speed - 1):.0%} {'faster' if speed > 1 else 'slower'}"
    return f"{text} (recommended)" if saving.is_used else text


def _checkpointing(plan: Plan) -> str:
    """The checkpointing of a row, with the loss and the offload that were chosen with it."""
    loss, policy, offloads = StrategyChoice.of(plan).activations
    parts = (loss if loss_words(loss) else "", policy if policy != "none" else "", "offload" if offloads else "")
    return " + ".join(filter(None, parts)) or NONE


def _candidate(r: Recommendation, task: Task, c: Candidate, why_not: str = "") -> CandidateView:
    plan, rate = c.plan, _throughput(c, task)
    chosen = r.winner is not None and c.plan == r.winner.plan and c.gpu == r.winner.gpu
    run = Training.of(c, r.request.tokens, None) if r.request.tokens else None
    return CandidateView(
        plan=plan,
        label=c.label,
        strategy=c.label.partition(" (")[0],
        checkpointing=_checkpointing(plan),
        gpu=c.gpu,
        allocator_conf=c.allocator_conf,
        fits=c.fits,
        chosen=chosen,
        peak_known=c.needed_bytes is not None,
        needed_bytes=c.known_bytes,
        throughput=rate,
        needed_text=_bare(c.known_bytes) + (CACHE_MARK if c.runs_in_available else ""),
        available_text=_bare(c.available_bytes),
        throughput_text=format_rate(rate) if rate else UNKNOWN,
        time_text=UNKNOWN if run is None or run.days is None else _time(run.days),
        gpu_hours_text=UNKNOWN if run is None or run.gpu_hours is None else f"{run.gpu_hours:,.0f}",
        fits_text="does not fit" if c.fits is False else "fits",
        why_not=why_not,
    )


def _throughput(c: Candidate, task: Task) -> float | None:
    """Tokens or images (as the task counts) per second per GPU; None if the time is unknown."""
    tokens = c.tokens_per_second_per_gpu
    return None if tokens is None else task.samples_or_tokens(tokens, c.plan.seq_len)


def _rejection(rejection: Rejection) -> RejectionView:
    needed = rejection.candidate.needed_bytes if rejection.candidate else None
    return RejectionView(
        label=rejection.choice.label,
        micro_batch_size="" if rejection.micro_batch_size is None else str(rejection.micro_batch_size),
        needed_text="" if needed is None else _bare(needed),
        reason=rejection.reason,
    )


def _bare(n_bytes: int) -> str:
    return format_gib(n_bytes).removesuffix(" GiB")


def _job_line(advice: Advice) -> str:
    report, r = advice.report, advice.recommendation
    request, winner = r.request, r.winner
    gpus, nnodes = (winner.plan.world_size, winner.plan.nnodes) if winner else (request.gpus, request.nnodes)
    seq_len = winner.plan.seq_len if winner else report.seq_len
    sample = task_of(report.task).of_length(seq_len, images=request.images_per_sample)
    items = [sample, request.precision, request.optim, request.attention]
    if request.global_batch_size:
        items.append(f"global batch {request.global_batch_size}")
    whole = format_gib(r.gpu_memory_bytes)
    limit = f"{format_gib(r.available_bytes)} of {whole}; the allocator's cache may use the other {100 * request.margin:g} %"
    nodes = f" on {nnodes} nodes" if nnodes > 1 else ""
    return (
        f"{model_text(report)} on {gpus} x {winner.gpu if winner else report.gpu_name}{nodes}: {', '.join(items)}. "
        f"A plan fits if it runs in {limit if request.margin else whole}{_host_limit(r)}."
    )


def _host_limit(r: Recommendation) -> str:
    """The part of a node's host memory that a plan may need; empty if it is not given."""
    host = r.request.host_memory
    if host is None:
        return ""
    return f", and in a node's {format_gib(host)} of host memory"


def _heading(r: Recommendation) -> str:
    winner = r.winner
    if winner is None:
        return "Nothing fits."
    if winner.needed_bytes is None:
        return f"By its states alone: {winner.label}"
    plan, steps = winner.plan, winner.plan.gradient_accumulation_steps
    accumulation = f"accumulation {steps}" if steps > 1 else "no accumulation"
    return f"Recommended: {winner.label}, micro-batch {plan.micro_batch_size}, {accumulation}, global batch {plan.global_batch_size}"


def _other_methods(methods: Sequence[Method]) -> Iterator[str]:
    """How to ask for the methods that were compared; nothing if none was."""
    if not methods:
        return
    requests = [method.advice.recommendation.request for method in methods if method.advice is not None]
    targets = next((request.lora_target_modules for request in requests if request.lora_target_modules), None)
    adapters = "--use-peft" + (f" --lora-target-modules {targets}" if targets else "")
    yield f"for the launch files of LoRA or QLoRA, give {adapters}, or the same with --load-in-4bit, instead of --method any"


def _method(method: Method, task: Task) -> str:
    """A compared method in one line: its best plan, with memory and speed."""
    if method.advice is None:
        return f"{method.name}: {method.reason}"
    r = method.advice.recommendation
    trained = f"{format_count(method.advice.report.trainable_parameters)} trained parameters"
    if r.winner is None:
        return f"{method.name} ({trained}): nothing fits"
    plan = f"{r.winner.label}, micro-batch {r.winner.plan.micro_batch_size}"
    return "; ".join(filter(None, [f"{method.name} ({trained}): {plan}", _figures(r, task), _training(r)]))


def _why_qlora_needs_more(methods: Sequence[Method]) -> Iterator[str]:
    """One line if QLoRA's plan needs more memory than LoRA's because of its activations, although the two differ only in the base."""
    found = {method.name: method.advice.recommendation for method in methods if method.advice}
    lora, qlora = (found[name].estimate if name in found else None for name in (LORA, QLORA))
    if lora is None or qlora is None or lora.at_peak is None or qlora.at_peak is None:
        return
    one, other = (replace(row.plan, dtype="auto") for row in (lora, qlora))
    more = (qlora.peak_tensor_bytes or 0) - (lora.peak_tensor_bytes or 0)
    activations = qlora.at_peak["activations"] - lora.at_peak["activations"]
    if one != other or more <= 0 or activations < more:
        return
    less = lora.at_peak["parameters"] - qlora.at_peak["parameters"]
    yield (
        f"QLoRA's tensors need {format_gib(more)} more than LoRA's in the same plan: parameters {format_gib(less)} less, activations "
        f"{format_gib(activations)} more. {FP32_AROUND_PACKED[0].upper()}{FP32_AROUND_PACKED[1:]}"
    )


def _figures(r: Recommendation, task: Task) -> str:
    """The winner's memory and speed in one line."""
    winner = r.winner
    if winner is None:
        return ""
    has = format_gib(winner.available_bytes)
    if winner.needed_bytes is None:
        simplest = "" if r.sweep else "the simplest plan whose states leave the margin: "
        items = [f"{simplest}states {format_gib(winner.state_bytes)}, and {has} are available"]
    else:
        items = [winner.gpu_memory_text]
    if winner.host_bytes_per_node:
        items.append(f"host memory {format_gib(winner.host_bytes_per_node)} per node")
    rate = _throughput(winner, task)
    if rate and winner.step_seconds:
        items.append(f"{format_rate(rate)} {task.counted}/s per GPU, {winner.step_seconds:.3g} s per step")
    if winner.allocator_conf is not None:
        items.append(f"with PYTORCH_ALLOC_CONF={winner.allocator_conf}")
    if winner.needed_bytes is None:
        reason = f"The peak is unknown: {why_unknown(winner.estimate)}"
        items.append(PEAK_UNKNOWN if is_count(r.request.model) else reason)
    return "; ".join(items)


def _training(r: Recommendation) -> str:
    run = r.training
    if run is None:
        return ""
    tokens = f"{format_count(run.tokens)} tokens"
    if run.days is None or run.gpu_hours is None:
        return f"{tokens}: the time of a step is unknown"
    cost = f", {run.cost:,.0f} at {run.price:g} per GPU hour" if run.cost is not None else ""
    return f"{tokens}: {_time(run.days)}, {run.gpu_hours:,.0f} GPU hours{cost}"


def _time(days: float) -> str:
    return f"{24 * days:.2g} hours" if days < 1 else f"{days:,.{1 if days < 100 else 0}f} days"


def _found(r: Recommendation, task: Task) -> FindView | None:
    sweep = r.sweep
    if sweep is None:
        return None
    answer = f"{sweep.answer}, {sweep.because}" if sweep.answer is not None else sweep.because
    return FindView(
        what=sweep.what,
        title=_FIND_TITLES[sweep.what],
        answer=answer,
        rows=tuple(_candidate(r, task, c) for c in sweep.rows),
        frontier=tuple(_candidate(r, task, c) for c in sweep.frontier),
    )


_FOLDER = "run/"
"""The folder for the exported files in the commands that a recommendation shows."""


def _launch(advice: Advice) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(commands, other targets). The commands export the plan for the first target that supports it, and run it. If no target has a
    training script for the plan, they export the target's file alone, which serves the user's own script.

    Each framework tiles by code of its own, so a plan with a tiled MLP is exported for the estimated framework alone.
    """
    r = advice.recommendation
    if r.winner is None or r.estimate is None:
        return (), ()
    job = Job.of(advice.report, r.estimate, environment=r.winner.environment)
    able = [target for target in TARGETS.values() if target.limit(job) is None]
    if job.plan.tiled_mlp != "none":
        able = [target for target in able if target.behaves_as(job.plan) == job.plan.framework]
    scripted = [target for target in able if script_limit(target, job) is None]
    able = scripted or able
    able.sort(key=lambda target: target.behaves_as(job.plan) != job.plan.framework)  # the estimated framework first
    if not able:
        return (), ()
    target, *others = able
    if scripted:
        output, start = _FOLDER, start_command(target, job, _FOLDER)
    else:
        output, start = target.file_name, target.line(job, target.file_name)
    command = f"fsdp-advisor export {target.name} {shlex.join(r.options)} -o {output}"
    return (command, start), tuple(other.name for other in others)
