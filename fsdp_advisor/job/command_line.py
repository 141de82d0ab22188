"""A plan as options of the command line: what `estimate` and `export` take to mean exactly this plan."""

from __future__ import annotations

from fsdp_advisor.job.fields import dashed, fields_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import GPU_DEPENDENT, EstimateRequest, RecommendRequest

_ALWAYS = ("model", "gpus", "gpu", "strategy", "backend", "seq_len")
"""Options that are written even with the default's value, because the default is computed or the strategy depends on it."""


def options_of(plan: Plan, request: EstimateRequest, *, gpu: str, allocator_conf: str | None) -> tuple[str, ...]:
    """The words of a command line, unquoted. Options with their default's value are left out.

    Defaults that depend on the GPU are written if they were given, or if the GPU was searched.
    The plan's values replace those of the request. Host memory is left out: it decides what fits, not what is launched.
    """
    decided = {
        "gpus": plan.world_size,
        "gpu": gpu,
        "allocator_conf": allocator_conf,
        "reserved": False,
        "host_memory": None,
    }
    if plan.offload == "none":
        decided["offload_device"] = "cpu"
    other_gpu = isinstance(request, RecommendRequest) and request.find == "gpu-type"
    always = {*_ALWAYS, *(GPU_DEPENDENT if other_gpu else GPU_DEPENDENT & request.given)}
    words: list[str] = []
    for name, field in fields_of(EstimateRequest).items():
        value = decided[name] if name in decided else getattr(plan, name, getattr(request, name))
        if name in always or value != field.default:
            words += [dashed(name), str(value)]
    return tuple(words)
