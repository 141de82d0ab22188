"""Answer a request for a recommendation: sweep or search, then describe the plans that were found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_advisor.advice.batches import batches, batches_if_possible, recorded_only
from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.cost import Training
from fsdp_advisor.advice.decision_tree import decision_tree
from fsdp_advisor.advice.evaluator import Evaluator, Timer
from fsdp_advisor.advice.methods import adapter_remedy, advice_of_methods
from fsdp_advisor.advice.open_choices import open_choices
from fsdp_advisor.advice.ranking import SPEED_RESOLUTION, actual_speed, runners_up
from fsdp_advisor.advice.remedies import MAX_ADVISED_GPUS, remedies
from fsdp_advisor.advice.result import Advice, Recommendation
from fsdp_advisor.advice.rules_of_thumb import rules_of_thumb
from fsdp_advisor.advice.savings import savings
from fsdp_advisor.advice.search import Rejection, Search, SearchResult
from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice, base_plan
from fsdp_advisor.advice.sweeps import Sweep, SweepResult
from fsdp_advisor.advice.vllm_settings import with_vllm_started
from fsdp_advisor.assumptions import gpu_of, keeps_packed_base_whole, settled
from fsdp_advisor.errors import AdvisorError, MissingExtra, NotRecordable, UsageError, assert_never
from fsdp_advisor.estimator import lazy_report, requested
from fsdp_advisor.job.adaptation import adaptation_of, may_adapt
from fsdp_advisor.job.choices import MAX_GPUS
from fsdp_advisor.job.fields import dashed, fields_of
from fsdp_advisor.job.ignored import ignored_in_search
from fsdp_advisor.job.keywords import RecommendOptions, with_signature_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.adapted_catalog import adapted_profile
from fsdp_advisor.model.kernels import without_unknown_liger
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved, split_recorder
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import Report
from fsdp_advisor.tape_keys import needs_recording
from fsdp_advisor.units import format_gib

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fsdp_advisor.configs import ConfigFiles


@with_signature_of(RecommendRequest)
def recommend(
    request: RecommendRequest | None = None,
    /,
    *,
    timer: Timer | None = None,
    config_file: ConfigFiles = (),
    **options: Unpack[RecommendOptions],
) -> Advice:
    """The report of a job, and its fastest plan that fits and leaves the margin.

    Takes a `RecommendRequest`, or its fields as keywords; `model` may also be what `record_module` returns. `config_file` names
    configuration files of other tools; keywords win over them. `timer` replaces the time model. Raises AdvisorError with a hint.
    """
    fields, recorded = split_recorder({**options, "config_file": config_file})
    request = settled(request or requested(fields, RecommendRequest))
    model = recorded or resolve(request.model, allow_recording=needs_recording(request))
    if request.method == "any":
        return advice_of_methods(request, lambda one: _advice(settled(one), model, timer))
    return with_adapter_remedy(_advice(request, model, timer), request, model, timer)


def with_adapter_remedy(
    advice: Advice, request: RecommendRequest, model: Resolved, timer: Timer | None = None
) -> Advice:
    """The advice with LoRA or QLoRA among its remedies, if nothing fits without and one of them does. Only adapters whose recordings are
    shipped are tried.
    """
    found = advice.recommendation
    if found.winner is not None or request.find or may_adapt(request):
        return advice
    model = replace(model, recording_allowed=False)

    def fit(one: RecommendRequest) -> Candidate | None:
        one = settled(one)
        adaptation = adaptation_of(one)
        if model.source != "catalog" or adapted_profile(model.name, adaptation) is None:
            return None
        adapted = model.adapted(adaptation)
        return _search(lazy_report(one.as_estimate, adapted), adapted, one, timer).winner

    remedy = adapter_remedy(request, fit)
    if remedy is None:
        return advice
    return replace(advice, recommendation=replace(found, remedies=(*found.remedies, remedy)))


def _advice(request: RecommendRequest, model: Resolved, timer: Timer | None) -> Advice:
    request = with_vllm_started(request, model)
    report = lazy_report(request.as_estimate, model)
    return Advice(report=report, recommendation=recommend_resolved(report, model, request, timer=timer))


def recommend_resolved(
    report: Report,
    model: Resolved,
    request: RecommendRequest,
    *,
    timer: Timer | None = None,
    allowed: Callable[[Plan], bool] = lambda plan: True,
) -> Recommendation:
    """The recommendation for a job whose report is known. `allowed` says which plans are searched, whatever their batch."""
    model = model.adapted(adaptation_of(request))
    _check_sweep(report, model, request)
    every = _search(report, model, request, timer)
    sweep = Sweep(request=request, search=every.limited_to(allowed), allowed=allowed)
    errors = dict(_recording_errors(every, sweep.search, allowed))
    unrecorded = tuple(Rejection(choice=c, micro_batch_size=None, reason=error.message) for c, error in errors.items())
    if not sweep.search.choices:
        for error in errors.values():
            raise error
        raise NotRecordable(
            "no strategy supports all options given", hint="leave --strategy, --backend or --offload open"
        )
    found = None
    if request.find:
        sweep, found = _run(sweep)
    search = _search_of_answer(sweep, found)
    result = search.result if found is None else _around(found, search)
    winner = result.winner
    missing = next((error for error in errors.values() if isinstance(error, MissingExtra)), None)
    if winner is None and missing is not None:  # nothing that was recorded fits, but others may
        raise missing
    changes = () if winner is not None else tuple(remedies(sweep))
    warnings = tuple(_warnings(winner))
    return Recommendation(
        request=request,
        winner=winner,
        runners_up=result.runners_up,
        rejected=(*result.rejected, *unrecorded),
        tree=decision_tree(search, winner, found, [change.because for change in changes]),
        rules=rules_of_thumb(
            search, request.as_estimate, winner, () if request.find in ("batch", "sequence") else result.feasible
        ),
        gpu_memory_bytes=search.evaluator.gpu.memory_bytes,
        available_bytes=search.evaluator.available_bytes,
        configurations=search.configurations,
        sweep=found,
        training=Training.of(winner, request.tokens, request.price) if winner and request.tokens else None,
        remedies=changes,
        savings=savings(search, winner) if winner else (),
        notes=(*_notes(request, search, result), *warnings),
        warnings=warnings,
    )


def _check_sweep(report: Report, model: Resolved, request: RecommendRequest) -> None:
    """Raise UsageError if the model lacks the quantity that `--find` varies, such as a sequence length."""
    if model.profile is None and request.find in ("batch", "sequence"):
        raise UsageError(
            f"{model.name} is a bare parameter count: it has no layers", hint="name a model: --find needs its layers"
        )
    task = task_of(report.task)
    if request.find == "sequence" and not task.takes_any_length:
        raise UsageError(
            f"{model.name} reads {task.of_length(report.seq_len)} and cannot read another length",
            hint="use --find batch",
        )


def _search(report: Report, model: Resolved, request: RecommendRequest, timer: Timer | None) -> Search:
    """The search of a request, with every choice that the request leaves open."""
    request = without_unknown_liger(request, model.profile)
    world, nnodes = request.gpus, request.nnodes
    if request.find == "gpus" and batches_if_possible(request, world=world) is None:
        world, nnodes = _first_possible_world(request), 1  # the sweep tries other numbers of GPUs later
    base = base_plan(request, gpus=world, nnodes=nnodes, seq_len=report.seq_len)
    allowed = recorded_only(batches(request, world=world), model, base)
    found = open_choices(request, model, base)
    return Search(
        evaluator=Evaluator(
            model=model,
            gpu=gpu_of(request.as_estimate)[0],
            margin=request.margin,
            allocator_conf=request.allocator_conf,
            host_memory_bytes=request.host_memory,
            host_unlimited=request.offload != "auto",
            timer=timer,
            known=report.estimates,
        ),
        base=base,
        batches=allowed,
        choices=found.choices,
        left_out=found.left_out,
    )


def _first_possible_world(request: RecommendRequest) -> int:
    """The smallest number of GPUs on which the job has batches; 1 if there is none."""
    worlds = range(1, MAX_GPUS + 1)
    return next((n for n in worlds if batches_if_possible(request, world=n) is not None), 1)


def _recording_errors(
    every: Search, search: Search, allowed: Callable[[Plan], bool]
) -> Iterator[tuple[StrategyChoice, AdvisorError]]:
    """The allowed choices that cannot be evaluated, each with the error that says why."""
    for choice in every.choices:
        if choice in search.choices or not allowed(every.plan(choice, every.batches.smallest)):
            continue
        if (error := every.recording_error(choice)) is not None:
            yield choice, error


def _run(sweep: Sweep) -> tuple[Sweep, SweepResult]:
    """The sweep's result. Without a known host memory, choices that offload are used only if nothing fits without them. A sweep over GPUs
    then says how many are needed without offload.
    """
    if sweep.request.offload != "auto" or sweep.request.host_memory is not None:
        return sweep, sweep.run()
    on_gpu = tuple(c for c in sweep.search.choices if c.offload == "none")
    if not on_gpu:
        return sweep, sweep.run()
    without = replace(sweep, search=replace(sweep.search, choices=on_gpu))
    if (found := without.run()).winner is not None:
        return without, found
    found = sweep.run()
    if found.what == "gpus" and found.winner is not None:
        gpus = without.min_gpus(MAX_ADVISED_GPUS)
        needed = f"it needs {gpus}" if gpus is not None else f"nothing fits on up to {MAX_ADVISED_GPUS}"
        found = replace(found, because=f"{found.because}, with offload to the host; without offload {needed}")
    return sweep, found


def _search_of_answer(sweep: Sweep, found: SweepResult | None) -> Search:
    """The search on the GPUs or at the length that the sweep found; for other sweeps, or without a result, the sweep's own search."""
    if found is None or found.winner is None:
        return sweep.search
    match found.what:
        case "gpus":
            return sweep.on_world(found.winner.plan.world_size)
        case "gpu-type":
            return sweep.on_gpu(found.winner.gpu)
        case "sequence":
            return replace(sweep.search, base=replace(sweep.search.base, seq_len=found.winner.plan.seq_len))
        case "batch":
            return sweep.search
        case _:
            assert_never(found.what)


def _around(found: SweepResult, search: Search) -> SearchResult:
    """The sweep's winner, with other choices as runners-up: those that the sweep tried, or those of a search on the GPUs that it found."""
    winner = found.winner
    if winner is None:
        return replace(search.result, winner=None, runners_up=())
    if found.what in ("gpus", "gpu-type"):
        others = tuple(c for c in search.result.feasible if c.choice != winner.choice)
        rejected = tuple(r for r in search.result.rejected if r.choice != winner.choice)
        return SearchResult(winner=winner, runners_up=runners_up(winner, others), rejected=rejected)
    others = tuple(c for c in found.rows if c.fits and c.choice != winner.choice)
    tried = {winner.choice, *(c.choice for c in others)}
    reason = f"it fits no {'larger micro-batch' if found.what == 'batch' else 'longer sequence'}"
    rest = (Rejection(choice=c, micro_batch_size=None, reason=reason) for c in search.choices if c not in tried)
    return SearchResult(winner=winner, runners_up=runners_up(winner, others), rejected=tuple(rest))


def _warnings(winner: Candidate | None) -> Iterator[str]:
    """Warnings about reasons why the winner may not run."""
    if winner is not None and winner.host_unusual and winner.host_available_bytes is None:
        needs, usual = format_gib(winner.host_bytes_per_node or 0), format_gib(winner.host_usual_bytes)
        yield f"it takes {needs} of host memory per node, and nodes usually have {usual} or less: give --host-memory to check it"


def _notes(request: RecommendRequest, search: Search, result: SearchResult) -> Iterator[str]:
    gpu, winner = search.evaluator.gpu, result.winner
    yield from ignored_in_search(request)
    if request.find and request.offload == "auto" and not any(c.offload != "none" for c in search.choices):
        yield "offload was not searched: give --host-memory or --offload"
    if keeps_packed_base_whole(request):
        yield "FSDP does not shard 4-bit weights that are stored as uint8; with --bnb-4bit-quant-storage bfloat16 it does"
    if scales := _scales_to_nest(request, search.evaluator.model.profile, winner):
        yield f"the scales of the 4-bit weights take {format_gib(scales)} of every GPU; --use-bnb-nested-quant divides that by four"
    if names := _names_of(search.left_out):
        yield f"not searched, because their steps have to be recorded first: {', '.join(names)}; --thorough searches them"
    if search.batches.only_recorded:
        size = search.batches.smallest
        yield f"only micro-batch {size} was searched: others have to be recorded first, with torch and transformers"
    if winner is None and (fixed := _fixed_options(request)):
        yield f"fixed by the request: {fixed}"
    if winner is not None:
        on_host = winner.host_bytes_per_node
        if (
            winner.plan.offload != "none"
            and on_host is not None
            and not winner.host_unusual
            and request.host_memory is None
        ):
            host = format_gib(on_host)
            yield f"it takes {host} of host memory per node: give --host-memory to check it"
        yield from _numerics(winner, [other.candidate for other in result.runners_up])
    if gpu.lacks_bf16 and request.precision.startswith("bf16"):
        yield f"{gpu.name} does not compute in bf16: --precision fp16-mixed or fp32"


def _scales_to_nest(request: RecommendRequest, profile: Profile | None, winner: Candidate | None) -> int:
    """Bytes of the fp32 scales of a 4-bit base, which nested quantization would save. 0 if a plan fits without offload, so that it is
    not needed.
    """
    fits = winner is not None and winner.plan.offload == "none"
    if profile is None or not request.load_in_4bit or request.use_bnb_nested_quant or fits:
        return 0
    return profile.scales_bytes


def _names_of(left_out: Sequence[ActivationChoice]) -> tuple[str, ...]:
    """The names of the losses, checkpointing policies and offloads that were not searched, each once. Those that were left out only in
    combination with another are not listed.
    """
    whole = (parts for a in left_out if len(parts := a.parts) == 1 or a.activation_offload)
    return tuple(dict.fromkeys(parts[-1] for parts in whole))


_NARROWING = ("strategy", "backend", "offload", "offload_device", "activation_checkpointing", "micro_batch_size",
              "global_batch_size", "gradient_accumulation_steps", "wrap", "framework", "host_memory")  # fmt: skip
"""Options that leave out choices or batches of a search if they are given."""


def _fixed_options(request: RecommendRequest) -> str:
    """The options of the request that narrow the search, as on the command line; empty if there are none."""
    options = {name: option for name, option in fields_of(RecommendRequest).items() if name in _NARROWING}
    return ", ".join(f"{dashed(n)} {options[n].written(value)}" for n, value in request.changed.items() if n in options)


def _numerics(winner: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """A note if another plan would be faster than the winner only because it computes more in 16 bits."""
    on_gpu = (c for c in others if c.plan.offload == winner.plan.offload)
    other = max(on_gpu, key=actual_speed, default=None)
    if winner.numerics_gain == 1 or other is None or other.numerics_gain > 1:
        return
    faster = actual_speed(other) / actual_speed(winner) - 1
    bits = winner.plan.precision.removesuffix("-mixed")
    if faster > SPEED_RESOLUTION:
        yield (
            f"DDP runs under autocast: weights, norms, softmax and loss in fp32. {other.label} computes everything in {bits}, from "
            f"fp32 masters, and is {faster:.0%} faster for that reason alone. If you accept these numerics: "
            f"--strategy {other.plan.strategy}"
        )
