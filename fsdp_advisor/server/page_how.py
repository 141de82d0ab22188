"""The page that explains estimates by a worked example, and compares them with rules of thumb."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.advice.rules_of_thumb import decision_tree_by_size
from fsdp_advisor.estimator import estimate
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import GROUPS
from fsdp_advisor.render.explanation import components, share_text
from fsdp_advisor.render.view import report_view
from fsdp_advisor.report import Report
from fsdp_advisor.server import page_drawings
from fsdp_advisor.server.page_answer import TIMES
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_bytes, format_count, format_gib

EXAMPLE: dict[str, Any] = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB", "strategy": "zero3"}
"""The worked example."""

JOBS: tuple[dict[str, Any], ...] = (
    {"model": "google/gemma-2b", "gpus": 8, "gpu": "RTX-4090"},
    {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8, "gpu": "A100-80GB"},
    {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100-80GB", "micro_batch_size": 4},
    {"model": "meta-llama/Llama-2-13b-hf", "gpus": 8, "gpu": "A100-40GB"},
    {"model": "meta-llama/Llama-2-70b-hf", "gpus": 8, "gpu": "H100-80GB"},
)
"""Jobs for which rules of thumb are compared with estimates."""

_BYTES_PER_PARAMETER = 16
"""fp32 weights, gradients and Adam's two moments: 4 + 4 + 8."""


def view() -> dict[str, Any]:
    """The page's values."""
    example = estimate(**EXAMPLE)
    (row,) = example.estimates
    return {
        "example": _worked(example, row),
        "step_drawing": page_drawings.step(report_view(example), row, row.timeline),
        "rules": [_rule(job) for job in JOBS],
    }


def _worked(report: Report, row: StrategyEstimate) -> dict[str, Any]:
    live, peak, needed = row.at_peak or {}, row.peak_tensor_bytes or 0, row.needed_breakdown or {}
    by_thumb = _BYTES_PER_PARAMETER * report.parameters // report.request.gpus
    return {
        "model": report.model_name,
        "gpus": report.request.gpus,
        "gpu": report.gpu_name,
        "gpu_memory": format_gib(report.gpu_memory_bytes),
        "parameters": report.parameters,
        "weights": format_gib(row.states["parameters"]),
        "optimizer": format_gib(row.states["optimizer"]),
        "sections": len(row.timeline),
        "alive": [
            {"name": c.name, "meaning": c.meaning, "size": format_bytes(c.n_bytes), "share": share_text(c.share)}
            for c in components(live)
        ],
        "peak": format_gib(peak),
        "phase": row.peak_phase,
        "where": row.peak_where,
        "by_thumb": format_gib(by_thumb),
        "missing": format_gib(peak - by_thumb),
        "outside_tensors": [
            f"{text} {format_gib(needed[name])}" for name, text in NON_TENSOR_PARTS.items() if needed.get(name)
        ],
        "needed": format_gib(row.needed_bytes or 0),
        "not_states": format_gib(peak - sum(live.get(k, 0) for k in GROUPS["states"])),
    }


def _rule(job: dict[str, Any]) -> dict[str, Any]:
    report = estimate(**job)
    by_name, _ = decision_tree_by_size(report.parameters, False) or ("zero3", "none")
    named = next(e for e in report.estimates if e.plan.strategy == by_name and e.plan.offload == "none")
    sharded = next(e for e in report.estimates if e.plan.strategy == "zero3" and e.plan.offload == "none")
    by_thumb = _BYTES_PER_PARAMETER * report.parameters // report.request.gpus
    fitting = next((e for e in report.estimates if e.fits), None)
    return {
        "model": report.model_name,
        "parameters": format_count(report.parameters),
        "where": f"{report.request.gpus}{TIMES}{report.gpu_name}",
        "batch": f"{report.request.micro_batch_size}{TIMES}{report.seq_len:,}",
        "by_name": named.label,
        "by_name_needs": format_gib(named.known_bytes),
        "by_name_fits": named.fits,
        "zero3_by_thumb": format_gib(by_thumb),
        "zero3_needs": format_gib(sharded.known_bytes),
        "first_that_fits": fitting.label if fitting else None,
    }
