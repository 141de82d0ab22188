"""The text view of a recommendation: what to launch, the way there, what was rejected."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.text import Text

from fsdp_advisor.advice import Advice, Candidate, Recommendation, Remedy
from fsdp_advisor.cli.drawing import Column, bar, draw, fitting, legend, paint
from fsdp_advisor.cli.drawing import wrap as fill
from fsdp_advisor.cli.figures import NONE, PARTS, UNKNOWN, parts_of
from fsdp_advisor.cli.output import Screen
from fsdp_advisor.export import TARGETS, Job
from fsdp_advisor.job.request import dashed
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.units import format_count, format_gib, format_speed

RUNNERS_UP = 5
BAR_WIDTHS = (10, 60)
_WHETHER_IT_RUNS = (
    "whether it runs is not known: a parameter count tells nothing of activations, logits and gathered units. "
    "Give --model a name or a config.json"
)
_UNITS = ("GiB", "tokens/s", "%")
_DEEPEST = 8
"""Levels of the tree that are indented further than the last."""


def wrap(said: str, screen: Screen, *, first: str = "", indent: str = "") -> str:
    """A paragraph in which a number and its unit stay together."""
    for unit in _UNITS:
        said = said.replace(f" {unit}", f"\0{unit}")
    return fill(said, screen, first=first, indent=indent).replace("\0", " ")


def text(advice: Advice, screen: Screen) -> str:
    """The whole answer, without a final newline."""
    r = advice.recommendation
    blocks = [
        wrap(_assumed(advice), screen),
        _winner(r, screen) if r.winner else _nothing(r, screen),
        "How it was decided\n" + _tree(r, screen),
        *([_found(r, screen)] if r.finding and r.finding.rows else []),
        *([_runners_up(r, screen)] if r.rivals and not r.finding else []),
        _rules(r, screen),
        *([_launch(advice, screen)] if r.winner else []),
    ]
    return "\n\n".join(blocks)


def _assumed(advice: Advice) -> str:
    """What was asked."""
    report, r = advice.report, advice.recommendation
    request = r.request
    plan = r.winner.plan if r.winner else None
    gpus, nnodes = (plan.world_size, plan.nnodes) if plan else (request.gpus, request.nnodes)
    nodes = f" on {nnodes} nodes" if nnodes > 1 else ""
    gpu = r.winner.gpu if r.winner else report.gpu_name
    length = task_of(report.task).of_length(plan.seq_len if plan else report.seq_len)
    job = [length, request.precision, request.optim, request.attention]
    if request.global_batch_size:
        job.append(f"global batch {request.global_batch_size}")
    whole = format_gib(r.gpu_memory_bytes)
    limit = f"{format_gib(r.available_bytes)} of {whole}: {100 * request.margin:g} % stay free"
    return (
        f"{report.model_name} ({format_count(report.parameters)} parameters) on {gpus} x {gpu}{nodes}: {', '.join(job)}. "
        f"A plan fits if it needs at most {limit if request.margin else whole}."
    )


def described(c: Candidate) -> str:
    """A candidate in words."""
    plan = c.plan
    steps = plan.gradient_accumulation_steps
    accumulated = f"accumulation {steps}" if steps > 1 else "no accumulation"
    return f"{c.label}, micro-batch {plan.micro_batch_size}, {accumulated}, global batch {c.global_batch_size}"


def _winner(r: Recommendation, screen: Screen) -> str:
    winner, estimate = r.winner, r.estimate
    assert winner is not None
    assert estimate is not None
    has = format_gib(winner.available_bytes)
    if winner.needed_bytes is None:
        head = Text(wrap(f"By its states alone: {winner.label}", screen), style="bold yellow")
        which = "" if r.finding else "the simplest whose states leave the margin: "
        lines = [paint(head, screen), f"{which}states {format_gib(winner.state_bytes)}, has {has}"]
    else:
        head = Text(wrap(f"Recommended: {described(winner)}", screen), style="bold green")
        lines = [paint(head, screen), f"needs {_needs(winner)}, has {has}"]
    if winner.host_bytes_per_node:
        lines[-1] += f"; host memory {format_gib(winner.host_bytes_per_node)} per node"
    if winner.tokens_per_second_per_gpu and winner.step_seconds:
        lines[-1] += f"; {format_speed(winner.tokens_per_second_per_gpu)} per GPU, {winner.step_seconds:.3g} s per step"
    if winner.allocator_conf is not None:
        lines[-1] += f"; under PYTORCH_ALLOC_CONF={winner.allocator_conf}"
    if winner.needed_bytes is None:
        lines[-1] += f"; {_WHETHER_IT_RUNS}"
    lines += [
        _bar(estimate, r, screen),
        *_training(r),
        *(f"warning: {warning}" for warning in (*r.warnings, *estimate.warnings)),
    ]
    return "\n".join([lines[0], *(_indented(line, screen) if i != 1 else line for i, line in enumerate(lines[1:]))])


def _needs(winner: Candidate) -> str:
    """What it needs on a GPU in the end, and what of that is no fragmentation."""
    needed = format_gib(winner.known_bytes)
    if winner.walked is None or winner.needed_bytes is None:
        return needed
    return f"{needed} with fragmentation ({format_gib(winner.needed_bytes)} without)"


def _indented(line: str, screen: Screen) -> str:
    return wrap(line, screen, first="  ", indent="  ")


def _bar(estimate: StrategyEstimate, r: Recommendation, screen: Screen) -> str:
    """What the winner needs against the whole GPU, and what its characters mean."""
    parts = parts_of(estimate)
    narrow, wide = BAR_WIDTHS
    drawn = bar(parts, r.gpu_memory_bytes, max(narrow, min(wide, screen.width - 2)), screen)
    shown = [part for part, n_bytes in parts if n_bytes]
    return paint(Text("  ") + drawn, screen) + "\n" + legend(shown, screen)


def _training(r: Recommendation) -> Iterator[str]:
    run = r.training
    if run is None:
        return
    tokens = f"{format_count(run.tokens)} tokens"
    if run.days is None or run.gpu_hours is None:
        yield f"{tokens}: the time of a step is not known"
        return
    cost = f", {run.cost:,.0f} at {run.price:g} per GPU hour" if run.cost is not None else ""
    yield f"{tokens}: {run.days:,.3g} days, {run.gpu_hours:,.0f} GPU hours{cost}"


def _nothing(r: Recommendation, screen: Screen) -> str:
    lines = [paint(Text("Nothing fits.", style="bold red"), screen)]
    lines += [wrap(f"{remedy.because}: {_options(remedy)}", screen, first="  ", indent="    ") for remedy in r.remedies]
    return "\n".join(lines)


def _options(remedy: Remedy) -> str:
    return " ".join(f"{dashed(name)} {value}" for name, value in remedy.options.items())


def _tree(r: Recommendation, screen: Screen) -> str:
    """The path, each question under the answer that leads to it."""
    elbow = "└─ " if screen.unicode else "`- "
    lines = []
    depth = 0
    for depth, node in enumerate(r.tree.path):
        indent = "   " * min(max(depth - 1, 0), _DEEPEST)
        first = indent + (elbow if depth else "")
        said = f"{node.on}: {node.question}" if depth else node.question
        lines.append(wrap(f"{said} {node.because}", screen, first=first, indent=indent + ("   " if depth else "  ")))
    last = r.tree.path[-1]
    indent = "   " * min(depth, _DEEPEST)
    lines.append(wrap(str(last.answer), screen, first=indent + elbow, indent=indent + "   "))
    return "\n".join(lines)


def _runners_up(r: Recommendation, screen: Screen) -> str:
    shown = r.rivals[:RUNNERS_UP]
    table = _table(shown, [r.why_not(c) for c in shown], screen)
    fitting_more, refused = len(r.rivals) - len(shown), len(r.refused)
    fit = "fit" if r.fits else "may fit"
    rest = [*([f"{fitting_more} more {fit}"] if fitting_more else []), *([f"{refused} do not fit"] if refused else [])]
    judged = f"{r.configurations:,} configurations were judged"
    said = "; ".join([*rest, "all before fragmentation" if r.winner and r.winner.walked else "", judged])
    return "Runners-up\n" + table + "\n" + wrap(said.replace("; ; ", "; ") + "; --json has them all.", screen)


def _found(r: Recommendation, screen: Screen) -> str:
    """What was looked for, row by row, and memory against speed around it."""
    finding = r.finding
    assert finding is not None
    titles = {"batch": "micro-batch", "sequence": "tokens", "gpus": "GPUs", "gpu-type": "GPU"}
    answer = f"{finding.answer}, {finding.because}" if finding.answer is not None else finding.because
    head = wrap(f"Found ({titles[finding.what]}): {answer}", screen)
    table = _table(finding.rows, None, screen, finding.what)
    blocks = [f"{head}\n{table}"]
    if len(finding.frontier) > 1:
        blocks.append("Memory against speed\n" + _frontier(finding.frontier, r, screen))
    return "\n\n".join(blocks)


def _table(rows: Sequence[Candidate], reasons: Sequence[str] | None, screen: Screen, what: str | None = None) -> str:
    plans = [c.plan for c in rows]
    columns = [
        Column("strategy", [c.label.partition(" (")[0] for c in rows]),
        Column("backend", [p.backend for p in plans]),
        Column("checkpointing", [p.activation_checkpointing.replace("none", NONE) for p in plans], rank=4),
        Column(
            "batch x acc.",
            [f"{p.micro_batch_size} x {p.gradient_accumulation_steps}" for p in plans],
            right=True,
            rank=5,
        ),
    ]
    if any(c.needed_bytes is not None for c in rows):
        columns.append(Column("needs GiB", [_gib(c.needed_bytes) for c in rows], right=True))
        columns.append(Column("tokens/s", [_speed(c) for c in rows], right=True))
    else:
        columns.append(Column("states GiB", [_gib(c.state_bytes) for c in rows], right=True))
    own = {
        "sequence": Column("tokens", [str(p.seq_len) for p in plans], right=True),
        "gpus": Column("GPUs", [str(p.world_size) for p in plans], right=True),
        "gpu-type": Column("GPU", [c.gpu for c in rows]),
    }
    if what in own:
        columns.insert(0, own[what])
    if what is not None:
        fragmented = [_gib(c.walked.device_bytes) if c.walked else NONE for c in rows]
        columns.append(Column("fragmented", fragmented, right=True))
    if what == "gpu-type":
        columns.append(Column("has", [_gib(c.available_bytes) for c in rows], right=True))
    if what is not None and any(c.fits is False for c in rows):
        fits = Text("fits", style="green") if what == "gpu-type" else Text("")
        columns.append(Column("", [Text("does not fit", style="red") if c.fits is False else fits for c in rows]))
    if reasons is not None:
        columns.append(Column("why not", list(reasons), rank=3))
    return draw(fitting(columns, screen.width), screen)


def _frontier(points: Sequence[Candidate], r: Recommendation, screen: Screen) -> str:
    """A row per point: its memory as a bar, and its speed."""
    whole = r.gpu_memory_bytes
    names = [f"{c.label}, {c.plan.micro_batch_size} x {c.plan.seq_len}" for c in points]
    columns = [
        Column("needs GiB", [_gib(c.needed_bytes) for c in points], right=True),
        Column("", [bar([(PARTS[0], c.needed_bytes or 0)], whole, 24, screen) for c in points], rank=2),
        Column("tokens/s", [_speed(c) for c in points], right=True),
        Column("", [_speed_bar(c, points, screen) for c in points], rank=1),
        Column("what", names),
    ]
    return draw(fitting(columns, screen.width), screen)


def _speed_bar(c: Candidate, points: Sequence[Candidate], screen: Screen) -> Text:
    most = max(p.tokens_per_second_per_gpu or 0.0 for p in points)
    speed = c.tokens_per_second_per_gpu or 0.0
    return bar([(PARTS[2], round(1000 * speed / most) if most else 0)], 1000, 24, screen)


def _gib(n_bytes: int | None) -> str:
    return UNKNOWN if n_bytes is None else format_gib(n_bytes).split()[0]


def _speed(c: Candidate) -> str:
    return UNKNOWN if not c.tokens_per_second_per_gpu else format_speed(c.tokens_per_second_per_gpu).split()[0]


def _rules(r: Recommendation, screen: Screen) -> str:
    """What the rules of thumb would have said."""
    lines = ["Rules of thumb would have said" + (", before fragmentation" if r.winner and r.winner.walked else "")]
    for rule in r.rules:
        runs = {True: "which runs", False: "which does not run", None: "which may run"}[rule.would_run]
        said = f"{rule.says}, {runs}" if rule.says else "nothing"
        lines.append(wrap(f"{rule.source}: {said}: {rule.because}", screen, first="  ", indent="    "))
    return "\n".join(lines)


def _launch(advice: Advice, screen: Screen) -> str:
    """The export of the first consumer that can do the plan, and the line that uses it. Commands are never broken."""
    r = advice.recommendation
    assert r.estimate is not None
    job = Job.of(advice.report, r.estimate, environment=r.winner.environment if r.winner else None)
    able = [target for target in TARGETS.values() if target.unsupported(job) is None]
    able.sort(key=lambda target: target.behaves_as(job.plan) != job.plan.framework)  # what was estimated comes first
    if not able:
        return wrap("No consumer that can be exported to does this plan.", screen)
    target, others = able[0], [t.name for t in able[1:]]
    export = f"fsdp-advisor export {target.name} {shlex.join(r.options)} -o {target.file_name}"
    also = f"Other targets: {', '.join(others)}." if others else ""
    title = "To launch it" if r.fits else "To try it"
    return "\n".join([title, f"  {export}", f"  {target.line(job, target.file_name)}", *([wrap(also, screen)] if also else [])])  # fmt: skip
