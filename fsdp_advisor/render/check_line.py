"""The answer to `check`: whether a job fits, in one line."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.comparison import UNSHARDED, best_row, runs_as_ddp
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.render.sizes import Sizes
from fsdp_advisor.render.view import batch_items, why_unknown
from fsdp_advisor.report import Report
from fsdp_advisor.verdict import verdict_text


def check_result(report: Report) -> dict[str, Any]:
    """The verdict on the best row of a report: `fits`, `line` in words, the figures, settings that no figure contains,
    what is assumed for settings that the files leave open, and the report's notes.

    Raises UsageError if a configuration names a file that was not found: the job is then not known.
    """
    check_nothing_missing(report.request.configs)
    row, sizes = best_row(report), Sizes.of(report)
    plan = row.plan
    omitted = [item for reading in report.request.configs for item in reading.not_modelled]
    assumed = [item for reading in report.request.configs for item in reading.assumed]
    unknown = [key for reading in report.request.configs for key in reading.unknown]
    verdict = {True: "fits", False: "does not fit", None: "unknown"}[row.fits]
    nodes = f" on {plan.nnodes} nodes" if plan.nnodes > 1 else ""
    host = f" and {sizes.full(row.host_bytes_per_node)} of host memory per node" if row.host_bytes_per_node else ""
    needs = (
        ""
        if row.needed_bytes is None
        else f"needs {sizes.full(row.needed_bytes)} of {sizes.full(report.gpu_memory_bytes)}{host}, "
    )
    line = (
        f"{verdict}: {report.model_name}, {row.label} ({plan.backend}), {plan.world_size} x {report.gpu_name}{nodes}"
        f"{''.join(f', {item}' for item in batch_items(report))}: "
        f"{needs}{verdict_text(report, row, sizes.full).removeprefix('fits, ')}"
    )
    if row.vllm_missing_bytes and row.job_peaks is not None and row.job_peaks.vllm is not None:
        line += f"; {row.job_peaks.vllm.text}"
    if row.needed_bytes is None:
        line += f" ({why_unknown(row)})"
    if row.fits and row.host_bytes_per_node != 0 and report.request.host_memory is None:
        line += "; the host's size is unknown, so only the GPU was compared (--host-memory gives it)"
    if omitted:
        line += f"; not modelled: {'; '.join(omitted)}"
    if unknown:
        line += f"; unknown keys: {', '.join(unknown)}"
    return {
        "fits": row.fits,
        "line": line,
        "needed_bytes": row.needed_bytes,
        "headroom_bytes": row.headroom_bytes,
        "host_bytes_per_node": row.host_bytes_per_node,
        "not_modelled": omitted,
        "unknown": unknown,
        "assumed": assumed,
        "notes": [*report.notes, *([UNSHARDED] if runs_as_ddp(report.request) else [])],
    }
