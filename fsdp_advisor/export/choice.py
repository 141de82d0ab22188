"""Choose the plan to export: the one the user named, else the recommended one among those that the target supports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from fsdp_advisor.advice import recommend_resolved, with_vllm_started
from fsdp_advisor.assumptions import gpu_of, sequence_length, settled
from fsdp_advisor.engines.deepspeed.settings import hidden_size
from fsdp_advisor.errors import AdvisorError, NotRecordable, UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.export import check_supported, find
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.adaptation import launched
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.compatibility import OFFLOADS, label, plans
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.refusals import combination_refusal
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.multimodal import ImageModel
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.report import Report
from fsdp_advisor.tape_keys import needs_recording


class NothingFits(AdvisorError):
    """No configuration that the target supports fits."""

    exit_status = 1


def report_for(target: str, request: EstimateRequest, model: Resolved | None = None) -> Report:
    """A report with one row: the plan to export.

    If the request names a strategy, the row is that strategy, with the target's backend if the backend is "auto". If not, it is
    the fastest plan that fits with the recommendation's margin; options that were not given are searched. Unless a framework
    is given, the estimate assumes the target's. Raises NothingFits, and the errors of `estimate`.
    """
    consumer = find(target)
    model = model or resolve(request.model)
    is_open = bool(request.given)
    request = _with_framework(consumer, _with_backend(consumer, request))
    if is_open:
        request = settled(request)
    request = _with_fixed(consumer, request)
    _check_possible(consumer, request, model)
    if request.strategy == "all":
        request = _recommended(consumer, request, model)
    return estimate_resolved(request, model)


def needs_recording_for(target: str, request: EstimateRequest) -> bool:
    """Whether `report_for` needs a step that the catalog does not have, so that PyTorch has to record it."""
    return needs_recording(settled(_with_framework(find(target), request)))


def _with_fixed(consumer: Target, request: EstimateRequest) -> EstimateRequest:
    """The request with the values of the options that the target sets itself, unless they are given or assumed already."""
    fixed = consumer.fixes(request)
    return request.but(**{n: v for n, v in fixed.items() if n not in request.given and getattr(request, n) != v})


def _check_possible(consumer: Target, request: EstimateRequest, model: Resolved) -> None:
    """Raises UsageError if the target supports no plan that the request leaves open. Nothing is recorded for that."""
    jobs = [_unrecorded(plan, request, model) for plan in _open_plans(request, model)]
    reasons: dict[str, list[str]] = {}
    for job in jobs:
        reason = consumer.limit(job)
        if reason is None:
            return
        reasons.setdefault(reason, []).append(job.strategy)
    if request.strategy != "all" and jobs:
        check_supported(consumer, jobs[0])
    if jobs:
        (first, _), *others = reasons.items()
        text = "; ".join((first, *(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in others)))
        raise UsageError(
            f"{consumer.name} supports none of the possible plans: {text}",
            hint="change the options that it names, or use another target",
        )


def _open_plans(request: EstimateRequest, model: Resolved) -> Iterator[Plan]:
    """The plans that the request leaves open, each with its smallest batch. Plans that raise UsageError are left out."""
    if request.strategy != "all":
        choices: Iterable[tuple[Any, ...]] = [(request.strategy, request.offload, request.backend)]
    else:
        offloads = (request.offload,) if "offload" in request.given else tuple(OFFLOADS)
        backends = FRAMEWORKS[request.framework].backends if request.backend == "auto" else (request.backend,)
        choices = [(s, o, b) for o in offloads for s in OFFLOADS[o] for b in backends if b in OFFLOADS[o][s]]
    is_searched = request.strategy == "all" and "activation_checkpointing" not in request.given
    policies = ("none", "full") if is_searched else (request.activation_checkpointing,)
    seq_len, _ = sequence_length(request, model.profile)
    for (strategy, offload, backend), checkpointing in product(choices, policies):
        one = replace(
            request, strategy=strategy, offload=offload, backend=backend, activation_checkpointing=checkpointing
        )
        try:
            yield from plans(divided(one), seq_len=seq_len)
        except UsageError:
            continue


def _unrecorded(plan: Plan, request: EstimateRequest, model: Resolved) -> Job:
    """The job of a plan without any figure."""
    gpu, _ = gpu_of(request)
    adaptation = launched(request).on_checkpoint(model.packed)
    if adaptation.method == "LORA" and not adaptation.names_modules:
        # PEFT's default modules are known only after a recording
        adaptation = replace(adaptation, peft={**adaptation.peft, "target_modules": ["PEFT's"]})
    profile = model.profile
    return Job(
        plan=plan,
        label=label(plan.strategy, plan.offload),
        model_name=model.weights or model.name,
        task=model.task_after(adaptation),
        layer_classes=profile.layer_classes if profile else (),
        image_model=ImageModel.of(profile) if profile and plan.images is not None else None,
        largest_parameter_elements=profile.largest_parameter_elements if profile else None,
        hidden_size=hidden_size(profile) if profile else None,
        gpu_name=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        peaks={},
        host_bytes_per_node=0,
        adaptation=adaptation,
    )


def _with_backend(consumer: Target, request: EstimateRequest) -> EstimateRequest:
    """The request with the target's only backend, if that backend supports the strategy and offload asked for."""
    if consumer.backend is None or request.backend != "auto":
        return request
    able = OFFLOADS[request.offload]
    possible = able if request.strategy == "all" else {request.strategy: able.get(request.strategy, ())}
    if not any(consumer.backend in backends for backends in possible.values()):
        return request
    return request.but(backend=consumer.backend)


def _with_framework(consumer: Target, request: EstimateRequest) -> EstimateRequest:
    """The request with the target's framework, if that framework supports what is asked.

    Otherwise the request is unchanged, and the target itself reports what it does not support.
    """
    if "framework" in request.given or request.task not in FRAMEWORKS[consumer.framework].tasks:
        return request
    known = FRAMEWORKS[consumer.framework].backends
    strategies = OFFLOADS[request.offload] if request.strategy == "all" else (request.strategy,)
    able = {s: set(OFFLOADS[request.offload].get(s, ())) for s in strategies}
    if request.backend != "auto":
        able = {s: backends & {request.backend} for s, backends in able.items()}
    possible = any(
        b in known and combination_refusal(s, b, consumer.framework, request) is None
        for s, backends in able.items()
        for b in backends
    )
    return request.but(framework=consumer.framework) if possible else request


def _recommended(consumer: Target, request: EstimateRequest, model: Resolved) -> EstimateRequest:
    """The request with the options of the best plan that fits. Like `recommend`, it keeps the options that were given."""
    fixed = {name: v for name, v in request.changed.items() if name not in request.assumed}
    fixed |= {name: getattr(request, name) for name in request.given}
    searched = settled(RecommendRequest(**fixed, given=request.given, configs=request.configs))
    searched = with_vllm_started(searched, model)
    request = searched.as_estimate
    report = estimate_resolved(request, model)
    job = Job.of(report, report.estimates[0])
    try:
        advice = recommend_resolved(
            report, model, searched, allowed=lambda plan: consumer.limit(replace(job, plan=plan)) is None
        )
    except NotRecordable:
        reasons = {consumer.limit(Job.of(report, estimate)) for estimate in report.estimates}
        if None in reasons or len(reasons) > 1:
            raise
        raise UsageError(
            f"{consumer.name} supports none of the possible plans: {reasons.pop()}",
            hint="`fsdp-advisor export --list` lists the other targets",
        ) from None
    if advice.winner is not None:
        found = {**_options(advice.winner.plan), "allocator_conf": advice.winner.allocator_conf}
        return request.but(**found, steps_per_generation=searched.steps_per_generation)
    raise NothingFits(
        f"no plan that {consumer.name} supports fits {report.gpu_name} with {100 * searched.margin:g} % left free",
        hint="; ".join(remedy.because for remedy in advice.remedies[:2])
        or "name a --strategy to export it although it does not fit",
    )


def _options(plan: Plan) -> dict[str, Any]:
    """The options of a request that reproduce the plan."""
    return {name: getattr(plan, name) for name in fields_of(EstimateRequest) if hasattr(plan, name)}
