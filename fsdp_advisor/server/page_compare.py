"""Two plans side by side: the differences in their options, and the memory and time of each."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from pydantic_core import to_json

from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.render.advice_view import advice_view
from fsdp_advisor.render.parts import PARTS
from fsdp_advisor.render.svg import Bar, stacked_bars
from fsdp_advisor.render.view import model_text, report_view
from fsdp_advisor.report import Report, Rows
from fsdp_advisor.server.answers import Document, advise
from fsdp_advisor.server.page_answer import name_of
from fsdp_advisor.server.page_drawings import Drawing, drawing
from fsdp_advisor.server.page_exports import pinned
from fsdp_advisor.server.page_figures import figure_groups
from fsdp_advisor.server.page_words import choice, label
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib


def side(model: Resolved, request: RecommendRequest) -> Document:
    """One side of the comparison as JSON: the plan that the request gives, or the recommended one if it leaves any open."""
    report, chosen = _plan(model, request)
    report = replace(report, estimates=Rows.of([chosen]))
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
    return advice.report, advice.estimate or advice.report.closest_row


def view(first: dict[str, Any], second: dict[str, Any], comparison: dict[str, Any]) -> dict[str, Any]:
    """Everything `compare.html` shows of two sides. `comparison` is the JSON of `Comparison`."""
    figures = {(group, name): [value, ""] for group, name, value in first["figures"]}
    for group, name, value in second["figures"]:
        figures.setdefault((group, name), ["", ""])[1] = value
    groups = list(dict.fromkeys(group for group, _ in figures))
    return {
        "sides": [first, second],
        "differences": [
            {
                "options": [
                    (label(name), *(choice(name, str("default" if v is None else v)) for v in (both["a"], both["b"])))
                    for name, both in difference["options"].items()
                    if both["a"] != both["b"]
                ],
                "effect": difference["reason"] or _effect(difference["needed_bytes"], difference["step_time"]),
                "cures": difference["cures"],
            }
            for difference in comparison["differences"]
        ],
        "cure": [label(name) for name in comparison["cure"]],
        "figures": [
            (group, name, a, b, _difference(a, b))
            for (group, name), (a, b) in sorted(figures.items(), key=lambda figure: groups.index(figure[0][0]))
        ],
        "bars_drawings": _bars(first, second),
    }


def _effect(needed_bytes: int | None, step_time: float | None) -> str:
    """The effect of one difference in words: of `needed_bytes` (change of a GPU's memory) and `step_time` (factor of the time per token).

    >>> _effect(2**30, 1.5), _effect(0, 0.9), _effect(None, None)
    ('1.00 GiB more, 50 % slower', '10 % faster', 'unknown')
    """
    if needed_bytes is None and step_time is None:
        return "unknown"
    percent = round(100 * ((step_time or 1) - 1))
    memory = f"{format_gib(abs(needed_bytes))} {'more' if needed_bytes > 0 else 'less'}" if needed_bytes else ""
    time = f"{abs(percent)} % {'slower' if percent > 0 else 'faster'}" if percent else ""
    return ", ".join(filter(None, (memory, time))) or "none"


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
    """The values of a JSON document."""
    found: dict[str, Any] = json.loads(gzip.decompress(document.gzipped))
    return found
