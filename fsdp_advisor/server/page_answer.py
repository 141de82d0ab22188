"""The page's answer: what is asked becomes a recommendation and its rows, and those become what the template shows. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from fsdp_advisor.advice import Candidate, Recommendation
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved, gpu_of, streams_of
from fsdp_advisor.job.request import EstimateRequest, RecommendRequest
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.server import page_drawings as drawings
from fsdp_advisor.server.answers import advise
from fsdp_advisor.server.page_exports import exports, launch_line, pinned
from fsdp_advisor.server.page_figures import alive, figures, left_out, warnings
from fsdp_advisor.server.page_words import TIMES, job
from fsdp_advisor.timing import Interval
from fsdp_advisor.units import format_gib, format_speed
from fsdp_advisor.verdict import in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recommendation, and the strategies side by side at its micro-batch and checkpointing; `chosen` is explained."""

    recommendation: Recommendation
    report: Report
    chosen: StrategyEstimate
    streams: tuple[Interval, ...]


def answer(model: Resolved, request: RecommendRequest) -> Answer:
    """The recommendation and its rows; where nothing fits, the rows as asked, and the one that needs least."""
    advice = advise(model, request)
    recommendation, winner = advice.recommendation, advice.recommendation.winner
    asked = advice.report.request if winner is None else _like(advice.report, winner)
    report = _asked_for(estimate_resolved(asked, model, explain=True, walk="if it may fit"), request)
    report = replace(report, notes=(*advice.report.notes, *recommendation.notes))
    if winner is None:
        return Answer(recommendation=recommendation, report=report, chosen=nearest(report), streams=())
    row = next((e for e in report.estimates if e.plan == winner.plan), None)
    if row is None:
        assert recommendation.estimate is not None
        row = recommendation.estimate
        report = replace(report, estimates=(row, *report.estimates))
    try:
        streams = streams_of(model, winner.plan, gpu_of(asked)[0])
    except AdvisorError:  # no recording for it: its time is not known either
        streams = ()
    return Answer(recommendation=recommendation, report=report, chosen=row, streams=streams)


def _asked_for(report: Report, request: RecommendRequest) -> Report:
    """Without the rows that offload, where the question rules offload out."""
    rows = tuple(e for e in report.estimates if request.offload != "none" or e.plan.offload == "none")
    return replace(report, estimates=rows or report.estimates)


def _like(report: Report, winner: Candidate) -> EstimateRequest:
    """The job under every strategy that was asked about, at the winner's micro-batch, checkpointing, world and settings."""
    plan, asked = winner.plan, report.request
    return asked.but(
        gpus=plan.world_size,
        nnodes=plan.nnodes,
        gpu=winner.gpu,
        seq_len=asked.seq_len if plan.seq_len == report.seq_len else plan.seq_len,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        activation_checkpointing=plan.activation_checkpointing,
        allocator_conf=winner.allocator_conf,
    )


def nearest(report: Report) -> StrategyEstimate:
    """The row that needs least."""
    return min(report.estimates, key=lambda e: e.kept_bytes if e.needed_bytes is None else e.needed_bytes)


def view(found: Answer, config: str | None = None) -> dict[str, Any]:
    """Everything `answer.html` shows."""
    recommendation, report, chosen = found.recommendation, found.report, found.chosen
    files = exports(report, chosen, config)
    drawn = {
        "tree": drawings.tree(recommendation),
        "bars": drawings.bars(report, chosen),
        "step": drawings.step(report, chosen, chosen.timeline_on_gpu),
        "streams": drawings.streams(found.streams, chosen.label),
        "frontier": drawings.speed(recommendation, report.gpu_memory_bytes),
    }
    return {
        "title": f"{_name(chosen)}, {in_words(report, chosen)}: {report.model_name} - fsdp-advisor",
        "problem": None,
        "lasting": report.model_source != "hub",  # what the hub says may change at any time
        "fits": recommendation.fits,
        "says": says(found),
        "why": why(recommendation),
        "remedies": [
            {
                "because": r.because,
                "query": urlencode(recommendation.request.changed | dict(r.options)),
            }
            for r in recommendation.remedies
        ],
        "job": job(report),
        "launch": launch_line(files) if recommendation.winner else None,
        "notes": report.notes,
        **drawn,
        "patterns": drawings.patterns(*drawn.values()),
        "path": recommendation.tree.path,
        "rules": recommendation.rules,
        "label": chosen.label,
        "on_gpu": chosen.allocated and chosen.allocated.step,
        "needed": format_gib(chosen.needed_bytes or 0),
        "alive": alive(chosen.needed_breakdown or {}),
        "others": [_other(recommendation, c) for c in (*recommendation.rivals, *recommendation.refused)],
        "estimates": [
            {
                "label": e.label,
                "backend": e.plan.backend,
                "fits": e.fits,
                "query": "" if config or e is chosen else urlencode(pinned(report, e.plan)),
            }
            for e in report.estimates
        ],
        "own": next(i for i, e in enumerate(report.estimates) if e is chosen),
        "figures": figures(report),
        "warnings": warnings(report, chosen),
        "left_out": left_out(report),
        "exports": files,
    }


def _name(row: StrategyEstimate) -> str:
    """As people say it: `ZeRO-3 with FSDP2`."""
    backend = {"ddp": "", "fsdp2": " with FSDP2", "fsdp1": " with FSDP1", "deepspeed": " with DeepSpeed"}
    return row.label + backend[row.plan.backend]


def says(found: Answer) -> str:
    """The answer in one sentence."""
    report, chosen, winner = found.report, found.chosen, found.recommendation.winner
    ranks = report.request.gpus
    where = f"{ranks}{TIMES}{report.gpu_name}" if ranks > 1 else f"one {report.gpu_name}"
    has, need = report.gpu_memory_bytes, chosen.needed_bytes
    if winner is None:
        needed = (
            f"its states alone take {format_gib(chosen.kept_bytes)}" if need is None else f"it needs {format_gib(need)}"
        )
        return f"Nothing fits on {where}. {_name(chosen)} comes nearest: {needed}, and a GPU has {format_gib(has)}."
    plan = winner.plan
    how = f", micro-batch {plan.micro_batch_size}"
    how += f", {plan.gradient_accumulation_steps} of them a step" if plan.gradient_accumulation_steps > 1 else ""
    how += ", with activation checkpointing" if plan.activation_checkpointing == "full" else ""
    if need is None:
        return f"{_name(chosen)}{how}: its states take {format_gib(chosen.kept_bytes)} of {format_gib(has)} on each of {where}; the peak is not known."
    speed = winner.tokens_per_second_per_gpu
    fast = f", and each trains about {format_speed(speed)}" if speed else ""
    return f"{_name(chosen)}{how}: it peaks at {format_gib(need)} of the {format_gib(has)} on each of {where}{fast}."


def why(recommendation: Recommendation) -> str:
    """One more sentence: among how many it was chosen, or what it was asked to be."""
    winner, margin = recommendation.winner, f"{100 * recommendation.request.margin:g} %"
    if winner is None:
        return f"Looked at {recommendation.configurations:,} configurations, to leave {margin} of the memory free."
    if recommendation.finding is not None:
        said = recommendation.finding.because
    elif winner.tokens_per_second_per_gpu is None:
        said = f"The simplest of {1 + len(recommendation.rivals)} kinds of configuration that leave {margin} of the memory free"
    else:
        said = f"The fastest of {1 + len(recommendation.rivals)} kinds of configuration that leave {margin} of the memory free"
    training = recommendation.training
    if training is not None and training.days is not None and training.gpu_hours is not None:
        said += f"; {training.tokens:,} tokens take {training.days:,.1f} days, {training.gpu_hours:,.0f} GPU hours"
        said += f", at a cost of {training.cost:,.0f}" if training.cost is not None else ""
    return said.rstrip(".") + "."


def _other(recommendation: Recommendation, candidate: Candidate) -> dict[str, Any]:
    """A row of what was not chosen."""
    need, speed, has = candidate.needed_bytes, candidate.tokens_per_second_per_gpu, recommendation.available_bytes
    too_large = need is not None and need > has
    return {
        "label": candidate.label,
        "micro_batch_size": candidate.plan.micro_batch_size,
        "needs": "?" if need is None else format_gib(need).removesuffix(" GiB"),
        "speed": "" if speed is None or not candidate.fits else format_speed(speed).removesuffix(" tokens/s"),
        "because": f"more than {format_gib(has)}" if too_large else recommendation.why_not(candidate),
    }
