"""A candidate as options of the command line: what `estimate` and `export` take to mean exactly this plan."""

from __future__ import annotations

from fsdp_advisor.advice.evaluator import Candidate
from fsdp_advisor.job.request import EstimateRequest, RecommendRequest, dashed, fields_of

_LEFT_TO_DEFAULTS = ("interconnect", "precision", "optim", "attention", "backward_prefetch", "nnodes", "micro_batch_size",
                     "gradient_accumulation_steps", "activation_checkpointing", "offload", "offload_device", "framework",
                     "wrap", "reshard_after_forward", "allocator_conf")  # fmt: skip


def options_of(candidate: Candidate, request: RecommendRequest) -> tuple[str, ...]:
    """The words of a command line, unquoted; defaults are left out, but for what was chosen."""
    plan = candidate.plan
    values = {
        "model": request.model,
        "gpus": plan.world_size,
        "nnodes": plan.nnodes,
        "gpu": candidate.gpu,
        "interconnect": request.interconnect,
        "strategy": plan.strategy,
        "backend": plan.backend,
        "offload": plan.offload,
        "offload_device": plan.offload_device if plan.offload != "none" else "cpu",
        "precision": plan.precision,
        "optim": plan.optim,
        "micro_batch_size": plan.micro_batch_size,
        "seq_len": plan.seq_len,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "activation_checkpointing": plan.activation_checkpointing,
        "attention": plan.attention,
        "backward_prefetch": plan.backward_prefetch,
        "framework": plan.framework,
        "wrap": plan.wrap,
        "reshard_after_forward": plan.reshard_after_forward,
        "allocator_conf": candidate.allocator_conf,
    }
    words: list[str] = []
    for name, value in values.items():
        if name in _LEFT_TO_DEFAULTS and value == fields_of(EstimateRequest)[name].default:
            continue
        words += [dashed(name), str(value)]
    words += [dashed(name) for name in ("forward_prefetch", "save_only_model") if getattr(plan, name)]
    return tuple(words)
