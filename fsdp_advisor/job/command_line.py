"""A plan as command-line options, with which `estimate` and `export` make exactly this plan again."""

from __future__ import annotations

from fsdp_advisor.job.choices import GPU_DEPENDENT
from fsdp_advisor.job.fields import as_words, fields_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

_ALWAYS = {"model", "gpus", "gpu", "strategy", "backend", "seq_len", *GPU_DEPENDENT}
"""Options that are written even with the default's value, because the default is computed or the strategy depends on it."""


def options_of(plan: Plan, request: EstimateRequest, *, gpu: str, allocator_conf: str | None) -> tuple[str, ...]:
    """The words of a command line, unquoted. Options that have their default value are left out.

    The plan's values replace those of the request.
    """
    decided = {
        "gpus": plan.world_size,
        "gpu": gpu,
        "allocator_conf": allocator_conf,
        "reserved": False,
        "global_batch_size": None,
    }
    if plan.offload == "none":
        decided["offload_device"] = "cpu"
    always = {*_ALWAYS, *request.set_by_framework}
    words: list[str] = []
    for name, field in fields_of(EstimateRequest).items():
        value = decided[name] if name in decided else getattr(plan, name, getattr(request, name))
        if name in always or value != field.default:
            words += as_words(name, field.written(value))
    return tuple(words)
