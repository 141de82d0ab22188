"""From a report and what is still open to a recommendation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsdp_advisor.advice.batches import batches
from fsdp_advisor.advice.cost import Training
from fsdp_advisor.advice.families import Family, Job, families
from fsdp_advisor.advice.finding import Finder, Finding
from fsdp_advisor.advice.fragmentation import MOST_WALKS, Allocator
from fsdp_advisor.advice.judge import Bytes, Candidate, Judge, Timer, anything_goes
from fsdp_advisor.advice.nodes import NO, YES, Node
from fsdp_advisor.advice.result import Advice, Recommendation, Remedy
from fsdp_advisor.advice.rules import rules_of_thumb
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.settling import Settled, anything, settle
from fsdp_advisor.advice.tree import grow
from fsdp_advisor.errors import AdvisorError, NotRecordable, UsageError
from fsdp_advisor.estimator import estimate_resolved, gpu_of, make_request, step_seconds
from fsdp_advisor.job.plan import OFFLOADS, Plan
from fsdp_advisor.job.request import Offload, RecommendRequest, Strategy
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import Report
from fsdp_advisor.units import format_gib, format_tokens


def recommend(request: RecommendRequest | None = None, /, *, timer: Timer = step_seconds, **options: Any) -> Advice:
    """The report of a job, and the fastest configuration of it that fits with the margin.

    Takes a `RecommendRequest`, or its fields as keywords. Raises AdvisorError with a hint.
    """
    request = request or make_request(options, RecommendRequest)
    model = resolve(request.model, allow_recording=False)  # what is missing in the catalog could not be recorded
    report = estimate_resolved(request.as_estimate, model)
    return Advice(report=report, recommendation=recommend_resolved(report, model, request, timer=timer))


def recommend_resolved(
    report: Report,
    model: Resolved,
    request: RecommendRequest,
    *,
    timer: Timer = step_seconds,
    allowed: Callable[[Plan], bool] = anything_goes,
) -> Recommendation:
    """As `recommend`, beside a report that is at hand. `allowed` says which plans are looked at, whatever their batch."""
    if model.profile is None and request.find in ("batch", "sequence"):
        raise UsageError(f"{model.name} is a bare parameter count: it has no layers", hint="name a model to find this")
    task = task_of(report.task)
    if request.find == "sequence" and not task.takes_any_length:
        raise UsageError(
            f"{model.name} reads {task.of_length(report.seq_len)}, and of no other length", hint="--find batch"
        )
    search = _search(report, model, request, timer, allowed)
    limit = model.profile.max_seq_len if model.profile is not None else None
    finder = Finder(request=request, search=search, max_seq_len=limit)
    finding = None
    if request.find:
        finder, finding = _find(finder)
        search = finder.search
        if finding.winner is not None and finding.what == "gpus":
            search = finder.on(finding.winner.plan.world_size)
        elif finding.winner is not None and finding.what == "gpu-type":
            search = finder.on_gpu(finding.winner.gpu)
        settled = _as_found(search, finding)
    else:
        settled = settle(search)
    winner = settled.winner
    warnings = tuple(_warnings(winner))
    remedies = () if winner is not None else tuple(_remedies(finder, search))
    return Recommendation(
        request=request,
        winner=winner,
        estimate=search.judge.whole(winner) if winner else None,
        rivals=settled.rivals if winner else (),
        refused=(*settled.failed, *(settled.rivals if not winner else ()), *search.losers),
        tree=grow(search, finding, settled, _what_would(remedies)),
        rules=rules_of_thumb(
            search.judge,
            lambda strategy, offload: _plainly(search, strategy, offload),
            winner,
            # the longest sequence and the largest batch are not the fastest
            {} if request.find in ("batch", "sequence") else {c.family: c for c in settled.rivals},
        ),
        gpu_memory_bytes=search.judge.gpu.memory_bytes,
        available_bytes=search.judge.available_bytes,
        configurations=search.configurations,
        finding=finding,
        training=Training.of(winner, request.tokens, request.price) if winner and request.tokens else None,
        remedies=remedies,
        left_out={f: why for f, why in search.judge.bytes.left_out.items() if f not in search.families},
        notes=(*_notes(request, search, winner), *warnings),
        warnings=warnings,
    )


def _as_found(search: Search, finding: Finding) -> Settled:
    """What was looked for, beside the others by the cheap figures."""
    winner = finding.winner
    rivals = tuple(c for c in search.leaders if winner is None or c.family != winner.family)
    return Settled(winner=winner, attempts=((winner,),) if winner is not None and winner.walked else (), rivals=rivals)


def _find(finder: Finder) -> tuple[Finder, Finding]:
    """What was looked for, without offload as long as nothing is known of the host; with it where nothing else fits."""
    request, search = finder.request, finder.search
    if request.offload == "auto" and request.host_memory is None:
        plain = tuple(f for f in search.families if f.offload == "none")
        on_gpu = replace(finder, search=replace(search, families=plain))
        if plain and (finding := on_gpu.find()).winner is not None:
            return on_gpu, finding
        finder.search.judge.allocator.allow()
    return finder, finder.find()


def _search(
    report: Report, model: Resolved, request: RecommendRequest, timer: Timer, allowed: Callable[[Plan], bool]
) -> Search:
    judge = Judge(
        model=model,
        gpu=gpu_of(request.as_estimate)[0],
        margin=request.margin,
        timer=timer,
        host_available_bytes=request.host_memory,
        bytes=Bytes(model),
        allocator=Allocator(allocator_conf=request.allocator_conf),
        allowed=allowed,
    )
    world, nnodes = request.gpus, request.nnodes
    if request.find == "gpus" and request.global_batch_size is not None:  # one that divides; others are looked at later
        world, nnodes = _dividing(request, request.global_batch_size), 1
    job = Job.of(request, gpus=world, nnodes=nnodes, seq_len=report.seq_len)
    sizes = batches(request, world=world)
    able = judge.able(families(request, nnodes=nnodes), job, sizes)
    if not able:
        why = next(iter(judge.bytes.left_out.values()), "nothing does all of what is asked")
        raise NotRecordable(why, hint="leave out what is held, such as --attention")
    return Search(judge=judge, job=job, batches=sizes, families=able)


def _dividing(request: RecommendRequest, whole: int) -> int:
    """A number of GPUs that divides the global batch, as far as there is one."""
    fixed = (request.micro_batch_size or 1) * (request.gradient_accumulation_steps or 1)
    return whole // fixed if request.micro_batch_size and request.gradient_accumulation_steps and whole >= fixed else 1


def _plainly(search: Search, strategy: Strategy, offload: Offload) -> Candidate | None:
    """A strategy as a rule of thumb means it: `auto` backend, the smallest micro-batch, no more tricks than asked for."""
    held = search.families[0].activation_checkpointing
    family = Family(
        strategy=strategy,
        backend=OFFLOADS[offload][strategy][0],
        offload=offload,
        activation_checkpointing="none" if any(f.activation_checkpointing == "none" for f in search.families) else held,
    )
    try:
        return search.at(family, search.batches.smallest)
    except AdvisorError:
        return None


def _remedies(finder: Finder, search: Search) -> Iterator[Remedy]:
    """What would fit where nothing does: offload, checkpointing, more GPUs, a larger GPU, fewer tokens."""
    job, gpu = search.job, search.judge.gpu.name
    would = "would" if search.judge.model.profile is not None else "may"  # by its states alone
    search.judge.allocator.allow()
    for held, what, free in _RELEASED:
        if getattr(finder.request, held) == "none":
            opened = finder.request.but(**{held: "auto"})
            more = search.judge.able(families(opened, nnodes=job.nnodes), job, search.batches)
            found = anything(replace(search, families=more))
            if found is not None and found.fits is not False:
                host = (
                    f", with {format_gib(found.host_bytes_per_node)} of host memory per node"
                    if held == "offload"
                    else ""
                )
                yield Remedy(options={held: free}, because=f"{what} {would} do{host}")
    if finder.request.find != "gpus" and (fewest := finder.fewest(MOST_ADVISED)) is not None:
        nodes = finder.nodes(fewest)
        on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
        yield Remedy(options={"gpus": fewest, "nnodes": nodes}, because=f"{fewest} x {gpu}{on_nodes} {would} do")
    if finder.request.find != "gpu-type" and (name := finder.smallest_gpu()) is not None:
        yield Remedy(options={"gpu": name}, because=f"{job.gpus} x {name} {would} do")
    search.judge.allocator.most = search.judge.allocator.walks + MOST_WALKS // 2
    profile = search.judge.model.profile
    if profile is not None and task_of(profile.task).takes_any_length and (tokens := finder.shorter()) is not None:
        yield Remedy(
            options={"seq_len": tokens}, because=f"{format_tokens(tokens)} instead of {job.seq_len} {would} do"
        )


MOST_ADVISED = 1024
"""More GPUs than these are no remedy; `--find gpus` looks further."""

_RELEASED = (
    ("activation_checkpointing", "activation checkpointing", "full"),
    ("offload", "offloading everything to the host", "parameters"),
)


def _what_would(remedies: tuple[Remedy, ...]) -> Node:
    return Node(
        id="more_gpus",
        question="Would more GPUs, another GPU or fewer tokens?",
        answer=YES if remedies else NO,
        because="; ".join(remedy.because for remedy in remedies) or "nothing that is known of",
    )


def _warnings(winner: Candidate | None) -> Iterator[str]:
    if winner is not None and winner.host_unusual and winner.host_usual_bytes is not None:
        needs, usual = format_gib(winner.host_bytes_per_node), format_gib(winner.host_usual_bytes)
        yield f"it takes {needs} of host memory per node, which usually has {usual} or less: --host-memory says what yours has"


def _notes(request: RecommendRequest, search: Search, winner: Candidate | None) -> Iterator[str]:
    gpu = search.judge.gpu
    if request.find and request.offload == "auto" and not any(f.offload != "none" for f in search.families):
        yield "offload was not looked at: give --host-memory or --offload"
    offloads = winner is not None and winner.plan.offload != "none" and not winner.host_unusual
    if winner is not None and offloads and request.host_memory is None:
        host = format_gib(winner.host_bytes_per_node)
        yield f"it takes {host} of host memory per node: --host-memory holds that against what a node has"
    if gpu.bf16_flops is None and gpu.architecture is not None and request.precision.startswith("bf16"):
        yield f"{gpu.name} does not compute in bf16: --precision fp16-mixed or fp32"
