"""The page's answer: the recommendation, the strategies side by side, and the values for the template. It does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from fsdp_advisor.assumptions import gpu_of
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.frameworks import BACKEND_NAMES
from fsdp_advisor.job.losses import loss_words
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.render.advice_view import AdviceView, CandidateView, advice_view, cache_note
from fsdp_advisor.render.explanation import components
from fsdp_advisor.render.view import ReportView, RowView, model_text, report_view
from fsdp_advisor.report import Report, Rows
from fsdp_advisor.server import page_drawings as drawings
from fsdp_advisor.server.answers import advise
from fsdp_advisor.server.page_exports import exports, launch_line, pinned
from fsdp_advisor.server.page_figures import figure_groups
from fsdp_advisor.server.page_what_if import Change, changes
from fsdp_advisor.step_figures import streams_of
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.timing import Interval
from fsdp_advisor.units import format_gib

TIMES = " \u00d7 "
MOST_FOUND = 8
"""Rows of a search that are shown at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recommendation, and all strategies at its micro-batch and checkpointing; `chosen` is the row that is explained."""

    advice: AdviceView
    report: Report
    chosen: StrategyEstimate
    streams: tuple[Interval, ...]


def answer(model: Resolved, request: RecommendRequest) -> Answer:
    """The recommendation and all strategies. If nothing fits, the strategies are those of the request, and `chosen` is the row that
    needs least.
    """
    advice = advice_view(advise(model, request, explain=True))
    winner = advice.winner
    asked = advice.report.request if winner is None else _like(advice.report, winner)
    known = advice.report if asked == advice.report.request else estimate_resolved(asked, model, explain=True)
    report = _asked_for(known, request)
    report = replace(report, request=asked, notes=(*advice.report.notes, *advice.notes))
    if winner is None:
        return Answer(advice=advice, report=report, chosen=report.closest_row, streams=())
    row = next((e for e in report.estimates if e.plan == winner.plan), None)
    if row is None:
        assert advice.estimate is not None
        row = advice.estimate
        report = replace(report, estimates=Rows.of([row, *report.estimates]))
    try:
        streams = streams_of(model, winner.plan, gpu_of(asked)[0])
    except AdvisorError:  # the step is not recorded, so its time is unknown
        streams = ()
    return Answer(advice=advice, report=report, chosen=row, streams=streams)


def _asked_for(report: Report, request: RecommendRequest) -> Report:
    """The report, without the rows that offload if the request forbids offload."""
    rows = [e for e in report.estimates if request.offload != "none" or e.plan.offload == "none"]
    return replace(report, estimates=Rows.of(rows) if rows else report.estimates)


def _like(report: Report, winner: CandidateView) -> EstimateRequest:
    """The job under every requested strategy, with the winner's micro-batch, checkpointing, world size and settings."""
    plan, asked = winner.plan, report.request
    return asked.but(
        gpus=plan.world_size,
        nnodes=plan.nnodes,
        gpu=winner.gpu,
        seq_len=asked.seq_len if plan.seq_len == report.seq_len else plan.seq_len,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        **_of_step(plan),
        allocator_conf=winner.allocator_conf,
    )


def _of_step(plan: Plan) -> dict[str, Any]:
    """The options of a plan that decide what its step keeps for backward, as a search chooses them."""
    return {name: getattr(plan, name) for name in ("loss", "activation_checkpointing", "activation_offload")}


def view(found: Answer, model: Resolved, options: Mapping[str, str]) -> dict[str, Any]:
    """Everything `answer.html` shows. `options` are the page's query. A pasted configuration has no address to link to."""
    report, chosen, advice = found.report, found.chosen, found.advice
    config = "config" in options
    plan = "" if config else urlencode(pinned(report, chosen.plan))
    shown = report_view(report)
    row = shown.rows[next(i for i, e in enumerate(report.estimates) if e is chosen)]
    files = exports(report, chosen, config=config) if advice.winner else []
    return {
        "problem": None,
        "lasting": report.model_source != "hub",  # a model on the hub may change at any time
        **_headline(found, shown, row),
        **_chosen_row(found, shown, row),
        **_alternatives(found, plan),
        **_tables(report, shown),
        "rows": [
            (r, "" if config or r is row else urlencode(pinned(report, e.plan)))
            for r, e in zip(shown.rows, report.estimates, strict=True)
        ],
        "changes": [] if config or advice.winner is None else _changes(advice.winner, report, options, model),
        "effects": f"{plan}&margin={margin}" if plan and (margin := options.get("margin")) else plan,
        "compare": urlencode({"a": plan}) if plan and advice.winner else "",
        "launch": launch_line(files) if advice.winner else None,
        "exports": files,
    }


def _headline(found: Answer, shown: ReportView, row: RowView) -> dict[str, Any]:
    """The job, the answer in a sentence, and what to know about it."""
    report, advice = found.report, found.advice
    return {
        "title": f"{name_of(row)}, {row.verdict}: {report.model_name} - fsdp-advisor",
        "job": (model_text(report), f"{report.request.gpus}{TIMES}{report.gpu_name}", *shown.job_items),
        "fits": advice.fits,
        "summary": summary(report, advice, row, shown.throughput_unit),
        "reason": f"{advice.why_not_simpler}." if advice.why_not_simpler else reason(advice),
        "training": advice.training,
        "cautions": advice.warnings,
        "remedies": advice.remedies,
        "notes": report.notes,
    }


def _chosen_row(found: Answer, shown: ReportView, row: RowView) -> dict[str, Any]:
    """The memory and the step of the chosen row."""
    chosen = found.chosen
    return {
        "row": row,
        "allocator_conf": found.report.request.allocator_conf,
        "bars": drawings.bars(shown, row),
        "step": drawings.step(shown, chosen, chosen.timeline),
        "streams": drawings.streams(found.streams, row.label),
        "peak_tensor_bytes": chosen.peak_tensor_bytes,
        "needed": format_gib(chosen.needed_bytes or 0),
        "components": components(chosen.needed_breakdown or {}),
    }


def _alternatives(found: Answer, plan: str) -> dict[str, Any]:
    """How the plan was decided, and other plans. `plan`: the query of the chosen one; empty if nothing may link to it."""
    report, advice = found.report, found.advice
    return {
        "steps": _steps(advice),
        "decision": next((n for n in advice.tree if n.id == "recommended" and n.taken), None)
        or {"question": "No plan fits with these options.", "because": ""},
        "frontier": drawings.speed(advice),
        "methods": advice.methods,
        "savings": advice.savings,
        "savings_title": advice.savings_title,
        "rules": advice.rules,
        "runners_up": [(c, urlencode({"a": plan, "b": _of(c, report)}) if plan else "") for c in advice.runners_up],
        "rejected": advice.rejected,
        "find": advice.found,
        "found_rows": _near_the_chosen(advice.found.rows) if advice.found else (),
        "cache_note": cache_note,
    }


def _tables(report: Report, shown: ReportView) -> dict[str, Any]:
    """What the tables of all strategies show besides their rows."""
    return {
        "footnotes": shown.footnotes,
        "throughput_unit": shown.throughput_unit,
        "figures": figure_groups(report, shown),
        "warnings": shown.warnings,
        "omissions": shown.omissions,
    }


def name_of(row: RowView) -> str:
    """The name of a row, such as `ZeRO-3 with FSDP2`."""
    return row.label if row.backend == "ddp" else f"{row.label} with {BACKEND_NAMES[row.backend]}"


def summary(report: Report, advice: AdviceView, row: RowView, unit: str) -> str:
    """The answer in one sentence."""
    ranks, winner = report.request.gpus, advice.winner
    gpus = f"{ranks}{TIMES}{report.gpu_name}" if ranks > 1 else f"one {report.gpu_name}"
    has = format_gib(report.gpu_memory_bytes)
    states = f"its states alone take {format_gib(row.states_bytes)}"
    need = None if row.needed_bytes is None else format_gib(row.needed_bytes)
    if winner is None:
        needs = states if need is None else f"it needs {need}"
        return f"Nothing fits on {gpus}. {name_of(row)} comes nearest: {needs}, and a GPU has {has}."
    plan = winner.plan
    how = f", micro-batch {plan.micro_batch_size}"
    how += f", {plan.gradient_accumulation_steps} accumulation steps" if plan.gradient_accumulation_steps > 1 else ""
    how += f", with {loss_words(plan.loss_code)}" if plan.loss != "auto" and loss_words(plan.loss_code) else ""
    how += ", with activation checkpointing" if plan.activation_checkpointing != "none" else ""
    how += ", with activation offload" if plan.activation_offload else ""
    if need is None:
        return f"{name_of(row)}{how}: {states} of {has} on each of {gpus}; the peak is unknown."
    fast = f", and each GPU trains about {row.throughput_text} {unit}" if row.throughput is not None else ""
    return f"{name_of(row)}{how}: it needs {need} of the {has} on each of {gpus}{fast}."


def reason(advice: AdviceView) -> str:
    """The sentence after the summary: the number of compared configurations, or the goal of a sweep."""
    if advice.winner is None:
        return f"None of {advice.configurations:,} configurations runs in {advice.usable_memory}."
    if advice.found is not None:
        text = advice.found.answer[:1].upper() + advice.found.answer[1:]
    else:
        kinds = f"{1 + len(advice.runners_up)} kinds of configuration that run in {advice.usable_memory}"
        best = "simplest" if advice.winner.throughput is None else "fastest"
        text = f"One of {kinds}. {advice.faster}" if advice.faster else f"The {best} of {kinds}"
    return f"{text}."


def _near_the_chosen(rows: tuple[CandidateView, ...]) -> tuple[CandidateView, ...]:
    """The row that answers a search and its neighbours."""
    at = next((i for i, row in enumerate(rows) if row.chosen), 0)
    first = max(0, min(at - MOST_FOUND // 2, len(rows) - MOST_FOUND))
    return rows[first : first + MOST_FOUND]


def _steps(advice: AdviceView) -> list[dict[str, Any]]:
    """The questions on the path to the decision, each with the other answers that it could have had."""
    return [
        {
            "question": node.question,
            "reason": node.because,
            "answer": node.answer,
            "others": [n.on for n in advice.tree if n.parent == node.id and n.on != node.answer],
        }
        for node in advice.path
    ]


def _changes(winner: CandidateView, report: Report, options: Mapping[str, str], model: Resolved) -> list[Change]:
    """What-if links for the job that the winner trains."""
    plan = winner.plan
    given = {"gpus": plan.world_size, "nnodes": plan.nnodes, "gpu": winner.gpu, "seq_len": plan.seq_len}
    asked = report.request.but(**given, **_of_step(plan))
    return changes(options, asked, model)


def _of(candidate: CandidateView, report: Report) -> str:
    """The query for exactly the plan of a candidate."""
    plan = candidate.plan
    request = report.request.but(
        gpu=candidate.gpu, gpus=plan.world_size, nnodes=plan.nnodes, allocator_conf=candidate.allocator_conf
    )
    return urlencode(pinned(replace(report, request=request), plan))
