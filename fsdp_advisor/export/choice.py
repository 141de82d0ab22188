"""Choose the plan to export: the one the user named, else the recommended one among those that the target supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.advice import recommend_resolved
from fsdp_advisor.assumptions import settled
from fsdp_advisor.errors import AdvisorError, NotRecordable, UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.export import find
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.compatibility import OFFLOADS, combination_refusal
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.report import Report
from fsdp_advisor.tapes import needs_recording


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
    request = _with_framework(consumer, _with_backend(consumer, settled(request)))
    if request.strategy == "all":
        request = _recommended(consumer, request, model)
    return estimate_resolved(request, model)


def needs_recording_for(target: str, request: EstimateRequest) -> bool:
    """Whether `report_for` needs a step that the catalog does not have, so that PyTorch has to record it."""
    return needs_recording(_with_framework(find(target), request))


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
    if "framework" in request.given:
        return request
    known = FRAMEWORKS[consumer.framework].backends
    strategies = OFFLOADS[request.offload] if request.strategy == "all" else (request.strategy,)
    able = {s: set(OFFLOADS[request.offload].get(s, ())) for s in strategies}
    if request.backend != "auto":
        able = {s: backends & {request.backend} for s, backends in able.items()}
    possible = any(
        b in known
        and combination_refusal(
            s,
            b,
            framework=consumer.framework,
            wrap=request.wrap,
            activation_checkpointing=request.activation_checkpointing,
            activation_offload=request.activation_offload,
        )
        is None
        for s, backends in able.items()
        for b in backends
    )
    return request.but(framework=consumer.framework) if possible else request


def _recommended(consumer: Target, request: EstimateRequest, model: Resolved) -> EstimateRequest:
    """The request with the options of the best plan that fits. Like `recommend`, it keeps the options that were given."""
    fixed = {name: getattr(request, name) for name in request.given | request.assumed}
    searched = RecommendRequest(**fixed, given=request.given, assumed=request.assumed)
    report = estimate_resolved(searched.as_estimate, model)
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
        return request.but(**_options(advice.winner.plan), allocator_conf=advice.winner.allocator_conf)
    raise NothingFits(
        f"no plan that {consumer.name} supports fits {report.gpu_name} with {100 * searched.margin:g} % left free",
        hint="; ".join(remedy.because for remedy in advice.remedies[:2])
        or "name a --strategy to export it although it does not fit",
    )


def _options(plan: Plan) -> dict[str, Any]:
    """The options of a request that reproduce the plan."""
    return {name: getattr(plan, name) for name in fields_of(EstimateRequest) if hasattr(plan, name)}
