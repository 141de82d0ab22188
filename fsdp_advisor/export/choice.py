"""Which plan is exported: the one that was named, else the recommended one of those that the target can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.advice import recommend_resolved
from fsdp_advisor.errors import AdvisorError, NotRecordable, UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.export import find
from fsdp_advisor.export.job import Job, Target
from fsdp_advisor.job.plan import FRAMEWORK_BACKENDS, OFFLOADS, Plan, refusal
from fsdp_advisor.job.request import EstimateRequest, RecommendRequest, fields_of
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.report import Report


class NothingFits(AdvisorError):
    """No configuration fits that the target can do."""

    exit_status = 1


def report_for(target: str, request: EstimateRequest, model: Resolved | None = None) -> Report:
    """A report of one row, the plan to export.

    With a strategy it is that one, with the target's backend where the choice is left open; without one, the fastest that
    fits with the recommendation's margin, and what was not given is searched. Unless a framework is given, it is estimated
    as the target trains it, and its allocator is walked. Raises NothingFits, or as `estimate` does.
    """
    consumer = find(target)
    model = model or resolve(request.model)
    request = _as_it_trains(consumer, _with_backend(consumer, request))
    if request.strategy == "all":
        request = _recommended(consumer, request, model)
    return estimate_resolved(request.but(reserved=True), model)


def _with_backend(consumer: Target, request: EstimateRequest) -> EstimateRequest:
    """The only backend that the target has, if it does what is asked."""
    if consumer.backend is None or request.backend != "auto":
        return request
    able = OFFLOADS[request.offload]
    possible = able if request.strategy == "all" else {request.strategy: able.get(request.strategy, ())}
    if not any(consumer.backend in backends for backends in possible.values()):
        return request
    return request.but(backend=consumer.backend)


def _as_it_trains(consumer: Target, request: EstimateRequest) -> EstimateRequest:
    """With the target's framework, unless it cannot do what is asked: then the target says so itself, and who can."""
    if "framework" in request.given:
        return request
    known = FRAMEWORK_BACKENDS[consumer.framework]
    strategies = OFFLOADS[request.offload] if request.strategy == "all" else (request.strategy,)
    able = {s: set(OFFLOADS[request.offload].get(s, ())) for s in strategies}
    if request.backend != "auto":
        able = {s: backends & {request.backend} for s, backends in able.items()}
    possible = any(
        b in known
        and refusal(
            s,
            b,
            framework=consumer.framework,
            wrap=request.wrap,
            activation_checkpointing=request.activation_checkpointing,
        )
        is None
        for s, backends in able.items()
        for b in backends
    )
    return request.but(framework=consumer.framework) if possible else request


def _recommended(consumer: Target, request: EstimateRequest, model: Resolved) -> EstimateRequest:
    """The request of the best plan that fits; what was given is held, as by `recommend`."""
    searched = RecommendRequest(**{name: getattr(request, name) for name in request.given}, given=request.given)
    report = estimate_resolved(searched.as_estimate, model)
    job = Job.of(report, report.estimates[0])
    try:
        advice = recommend_resolved(
            report, model, searched, allowed=lambda plan: consumer.cannot(replace(job, plan=plan)) is None
        )
    except NotRecordable:
        reasons = {consumer.cannot(Job.of(report, estimate)) for estimate in report.estimates}
        if None in reasons or len(reasons) > 1:
            raise
        raise UsageError(
            f"{consumer.name} can do none of what is asked: {reasons.pop()}",
            hint="the other targets: fsdp-advisor export --list",
        ) from None
    if advice.winner is not None:
        return request.but(**_options(advice.winner.plan), allocator_conf=advice.winner.allocator_conf)
    raise NothingFits(
        f"nothing that {consumer.name} can do fits {report.gpu_name} with {100 * searched.margin:g} % left free",
        hint="; ".join(remedy.because for remedy in advice.remedies[:2])
        or "a named --strategy is exported whether it fits or not",
    )


def _options(plan: Plan) -> dict[str, Any]:
    """A plan's fields that are a request's too."""
    return {name: getattr(plan, name) for name in fields_of(EstimateRequest) if name in Plan.__dataclass_fields__}
