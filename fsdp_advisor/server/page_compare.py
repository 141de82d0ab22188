"""Two plans side by side: what differs in their options, and what each needs."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from pydantic_core import to_json

from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.request import RecommendRequest
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.render.advice_view import advice_view
from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.svg import Bar, stacked_bars
from fsdp_advisor.render.view import model_text, report_view
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.server.answers import Document, advise
from fsdp_advisor.server.page_answer import name_of, nearest
from fsdp_advisor.server.page_drawings import Drawing, drawing
from fsdp_advisor.server.page_exports import pinned
from fsdp_advisor.server.page_figures import figure_groups
from fsdp_advisor.server.page_words import choice, label


def side(model: Resolved, request: RecommendRequest) -> Document:
    """One side of the comparison as JSON: the plan that the request gives, or the recommended one if it leaves any open."""
    report, chosen = _plan(model, request)
    report = replace(report, estimates=(chosen,))
    shown = report_view(report)
    (row,) = shown.rows
    values = pinned(report, chosen.plan)
    document = {
        "name": name_of(row),
        "label": row.label,
        "backend": row.backend,
        "job": [model_text(report), f"{chosen.plan.world_size} \u00d7 {report.gpu_name}", *shown.job_items],
        "fits": row.fits,
        "verdict": row.verdict,
        "query": urlencode(values),
        "options": {label(n): choice(n, str(v)) for n, v in values.items()} | {label("gpu"): report.gpu_name},
        "figures": [[group.name, r.name, r.cells[0]] for group in figure_groups(report, shown) for r in group.rows],
        "gpu": report.gpu_name,
        "gpu_memory_bytes": report.gpu_memory_bytes,
        "parts": {part.key: n_bytes for part, n_bytes in row.parts},
        "peak_known": row.peak_known,
    }
    return Document.of(to_json(document), lasting=report.model_source != "hub")


def _plan(model: Resolved, request: RecommendRequest) -> tuple[Report, StrategyEstimate]:
    """The plan of a request with the report that it belongs to. A request that fixes the plan needs no search."""
    if request.strategy != "all" and request.micro_batch_size is not None and request.find is None:
        report = estimate_resolved(request.as_estimate, model)
        return report, report.estimates[0]
    advice = advice_view(advise(model, request))
    return advice.report, advice.estimate or nearest(advice.report)


def view(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Everything `compare.html` shows of two sides."""
    names = list(dict.fromkeys([*first["options"], *second["options"]]))
    figures = {(group, name): [value, ""] for group, name, value in first["figures"]}
    for group, name, value in second["figures"]:
        figures.setdefault((group, name), ["", ""])[1] = value
    return {
        "sides": [first, second],
        "differences": [
            (name, *values)
            for name in names
            if len(set(values := [s["options"].get(name, "default") for s in (first, second)])) > 1
        ],
        "figures": [(group, name, a, b, _difference(a, b)) for (group, name), (a, b) in figures.items()],
        "bars_drawings": _bars(first, second),
    }


def _difference(first: str, second: str) -> str:
    """Second minus first, in their unit.

    >>> _difference("7,690", "7,550"), _difference("1.5 %", "2 %"), _difference("1.0", "?")
    ('-140', '+0.5 %', '')
    """
    unit = " %" if first.endswith(" %") else ""
    try:
        a, b = (float(text.removesuffix(" %").replace(",", "")) for text in (first, second))
    except ValueError:
        return ""
    digits = max(len(text.removesuffix(" %").partition(".")[2]) for text in (first, second))
    return "" if a == b else f"{b - a:+,.{digits}f}{unit}"


def _bars(*sides: dict[str, Any]) -> list[Drawing]:
    """A bar for each plan: in one drawing if their GPUs have the same memory, else in one drawing each."""
    by_gpu: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for letter, one in zip("AB", sides, strict=True):
        by_gpu.setdefault(one["gpu_memory_bytes"], []).append((letter, one))
    return [
        drawing(
            stacked_bars,
            [
                Bar(
                    label=f"{letter}: {one['label']}",
                    backend=one["backend"],
                    parts=tuple((part, one["parts"].get(part.key, 0)) for part in PARTS),
                    verdict=one["verdict"],
                    fits=one["fits"],
                    complete=one["peak_known"],
                )
                for letter, one in group
            ],
            memory_bytes,
            group[0][1]["gpu"],
            key=f"bars-{group[0][0]}",
        )
        for memory_bytes, group in by_gpu.items()
    ]


def read(document: Document) -> dict[str, Any]:
    """The values of a side, from the JSON of `side`."""
    found: dict[str, Any] = json.loads(gzip.decompress(document.gzipped))
    return found
