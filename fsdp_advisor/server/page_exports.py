"""The page's exports: files that launch the shown plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from fsdp_advisor.export import TARGETS, Job, export
from fsdp_advisor.job.choices import GPU_DEPENDENT
from fsdp_advisor.job.fields import as_query, fields_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One file with its text; `href` downloads it."""

    target: str
    file: str
    text: str
    usage: str
    notes: tuple[str, ...]
    href: str


def exports(report: Report, chosen: StrategyEstimate, *, config: bool) -> list[Export]:
    """Every file that can be written for the chosen row. With a pasted configuration (`config`) files have no address to download from."""
    job = Job.of(report, chosen)
    if not job.layer_classes:
        return []
    query = pinned(report, chosen.plan)
    found = []
    for name, target in TARGETS.items():
        if target.limit(job) is not None:
            continue
        made = export(name, job)
        found.append(
            Export(
                target=name,
                file=made.file_name,
                text=made.text,
                usage=made.usage,
                notes=made.notes,
                href="" if config else f"/api/v1/export/{name}?{urlencode(query)}",
            )
        )
    return found


def pinned(report: Report, plan: Plan) -> dict[str, str]:
    """The query for exactly this plan: options that differ from their defaults, and options that a search would otherwise choose."""
    known = fields_of(EstimateRequest)
    asked = {name: getattr(plan, name, v) for name, v in report.request.values.items() if v is not None}
    always = {"model", "strategy", "backend", "offload", *report.request.set_by_framework}
    always |= GPU_DEPENDENT & report.request.given
    return as_query({name: v for name, v in asked.items() if name in always or v != known[name].default})


def launch_line(found: Sequence[Export]) -> str | None:
    """The command that starts the job: the last line of the first launch script that needs only files of these exports."""
    texts = {e.target: e.text for e in found}
    order: tuple[str, ...] = ("deepspeed-launch", "accelerate-launch", "torchrun")
    if "fsdp2" in texts or "ddp" in texts:
        order = ("torchrun", *order)
    for script in (texts[name] for name in order if name in texts):
        if "\nexec " in script:  # only the command, without the rest of the script
            line = script.partition("\nexec ")[2].strip().removesuffix('"$@"').rstrip(" \\\n")
            set_before = re.findall(r"^export (PYTORCH_\w+=\S+)$", script, re.MULTILINE)
            return " ".join([*set_before, line])
    return None
