"""The what-if links next to an answer: changes of the job, and their effects on the recommended plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from pydantic_core import to_json

from fsdp_advisor.assumptions import gpu_of, is_past_table
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.server.answers import Document
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib

_LADDER = ("T4", "A10", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200")
"""GPUs of growing memory that clouds offer: the next one up and down is suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change: `options` replace those of the job; `query` asks for the changed job, with its plan chosen again."""

    key: str
    label: str
    options: Mapping[str, Any]
    query: str = ""


def changes(options: Mapping[str, str], asked: EstimateRequest, model: Resolved) -> list[Change]:
    """Links to changed jobs. `asked`: the plan that the page shows. `options`: the page's query."""
    base = {name: value for name, value in options.items() if name != "find"}
    if "find" in options:  # the searched quantity is now given
        base |= {
            name: str(getattr(asked, name)) for name in ("gpus", "nnodes", "gpu", "seq_len") if name in asked.given
        }
    found = (*_gpu_counts(asked), *_training(asked, model), *_gpus(asked))
    return [Change(key=c.key, label=c.label, options=c.options, query=urlencode(base | dict(c.options))) for c in found]


def _gpu_counts(asked: EstimateRequest) -> Iterator[Change]:
    """One GPU more and one fewer; whole nodes if there are several, or if the node is full."""
    gpus, nnodes = asked.gpus, asked.nnodes
    usual = gpu_of(asked)[0].gpus_per_node
    if nnodes == 1 and (usual is None or gpus < usual):
        yield Change(key="more", label="one GPU more", options={"gpus": gpus + 1})
    else:
        more = {"gpus": gpus // nnodes * (nnodes + 1), "nnodes": nnodes + 1}
        yield Change(key="more", label=f"one node more ({more['gpus']} GPUs)", options=more)
    if nnodes > 1:
        fewer = {"gpus": gpus // nnodes * (nnodes - 1), "nnodes": nnodes - 1}
        yield Change(key="fewer", label=f"one node fewer ({fewer['gpus']} GPUs)", options=fewer)
    elif gpus > 1:
        yield Change(key="fewer", label="one GPU fewer", options={"gpus": gpus - 1})


def _training(asked: EstimateRequest, model: Resolved) -> Iterator[Change]:
    profile = model.profile
    longer = 2 * (asked.seq_len or 0)
    if profile is not None and task_of(profile.task).takes_any_length and not is_past_table(profile, longer):
        yield Change(key="longer", label=f"sequences twice as long ({longer:,})", options={"seq_len": longer})
    if profile is not None:
        without = asked.activation_checkpointing == "none"
        label = f"{'with' if without else 'without'} activation checkpointing"
        options = {"activation_checkpointing": "full" if without else "none"}
        yield Change(key="checkpointing", label=label, options=options)


def _gpus(asked: EstimateRequest) -> Iterator[Change]:
    has = gpu_of(asked)[0]
    others = [gpu for gpu in map(find_gpu, _LADDER) if gpu.name != has.name]
    for key, gpu in (
        ("larger", next((g for g in others if g.memory_bytes > has.memory_bytes), None)),
        ("smaller", next((g for g in reversed(others) if g.memory_bytes <= has.memory_bytes), None)),
    ):
        if gpu is not None:
            options = {"gpu": gpu.name}
            if gpu.lacks_bf16 and asked.precision.startswith("bf16"):
                options["precision"] = "fp16-mixed"
            yield Change(key=key, label=f"on {gpu.name}", options=options)


def effects(model: Resolved, request: RecommendRequest) -> Document:
    """The effects of the changes on the plan of a request without open options, as JSON: a text by each change's key."""
    asked = request.as_estimate
    report = estimate_resolved(asked, model)
    plan = report.estimates[0]
    asked = asked.but(seq_len=report.seq_len)
    share = max(1 - request.margin, (plan.needed_bytes or 0) / report.gpu_memory_bytes)
    found = {c.key: _effect(model, asked.but(**c.options), plan, share) for c in changes({}, asked, model)}
    return Document.of(to_json(found), lasting=model.source != "hub")


def _effect(model: Resolved, changed: EstimateRequest, before: StrategyEstimate, share: float) -> str:
    """The plan's memory after a change, and the job's speed compared with before, in words.

    If it needs more than `share` of the memory, its micro-batch is halved.
    """
    try:
        report = estimate_resolved(changed, model)
    except AdvisorError as error:
        return f"not with this plan: {error.message}"
    after, has = report.estimates[0], report.gpu_memory_bytes
    micro_batch_size = changed.micro_batch_size
    if after.needed_bytes is None:
        return f"states {format_gib(after.kept_bytes)} of {format_gib(has)}"
    if (not after.fits or after.needed_bytes > share * has) and micro_batch_size > 1:
        return _effect(model, changed.but(micro_batch_size=micro_batch_size // 2), before, share)
    needed = f"{format_gib(after.needed_bytes)} of {format_gib(has)}"
    if not after.fits:
        return f"this plan no longer fits: {needed}"
    tight = "tight: " if after.needed_bytes > share * has else ""
    batch = f", micro-batch {micro_batch_size}" if micro_batch_size != before.plan.micro_batch_size else ""
    return f"{tight}{needed}{batch}{_faster(before, after)}"


def _faster(before: StrategyEstimate, after: StrategyEstimate) -> str:
    """The change of the speed of all GPUs together, in words."""
    if before.step is None or after.step is None:
        return ""
    old, new = (e.step.tokens_per_second_per_gpu * e.plan.world_size for e in (before, after) if e.step)
    percent = round(100 * (new / old - 1))
    return f", {abs(percent)}\u00a0%\u00a0{'faster' if percent > 0 else 'slower'}" if percent else ", equally fast"
