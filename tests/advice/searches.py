"""Shared by the tests of advice: searches with an artificial time model, so that they do not depend on measured speeds."""

from __future__ import annotations

from functools import cache
from typing import Any

from fsdp_advisor.advice import Candidate, Recommendation, recommend_resolved
from fsdp_advisor.advice.batches import batches
from fsdp_advisor.advice.evaluator import Evaluator, Timer
from fsdp_advisor.advice.open_choices import open_choices
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import base_plan
from fsdp_advisor.estimator import lazy_report
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.strategy_estimate import StrategyEstimate

LLAMA = "meta-llama/Llama-2-7b-hf"
GPT2 = "openai-community/gpt2-large"


def no_clock(model: Resolved, plan: Plan, gpu: Gpu) -> None:
    """A time model for which every step's time is unknown."""


def clock(model: Resolved, plan: Plan, gpu: Gpu) -> float:
    """Seconds of a step: sharding costs a little, recomputation a third, offload a factor of five; each micro-batch has a fixed cost."""
    per_token = 1e-4 * (1 + 0.05 * ("ddp", "zero1", "zero2", "zero3", "hsdp").index(plan.strategy))
    per_token *= 4 / 3 if plan.activation_checkpointing == "full" else 1
    per_token *= 5 if plan.offload != "none" else 1
    return plan.gradient_accumulation_steps * (0.05 + plan.micro_batch_size * plan.seq_len * per_token) + 0.02


def search_of(timer: Timer | None = clock, **options: Any) -> Search:
    """The search of a request."""
    request = make_request(options, RecommendRequest)
    model, allowed = resolve(request.model), batches(request, world=request.gpus)
    base = base_plan(request, gpus=request.gpus, nnodes=request.nnodes, seq_len=request.seq_len or 2048)
    return Search(
        evaluator=Evaluator(
            model=model,
            gpu=find_gpu(request.gpu or "H100-80GB"),
            margin=request.margin,
            timer=timer,
            host_memory_bytes=request.host_memory,
            host_unlimited=request.offload != "auto",
        ),
        base=base,
        batches=allowed,
        choices=open_choices(request, model, base).choices,
    )


@cache
def advise(timer: Timer | None = clock, **options: Any) -> Recommendation:
    """The recommendation for a job. Tests of the same job share one object, so they must not change it."""
    request = make_request(options, RecommendRequest)
    model = resolve(request.model)
    return recommend_resolved(lazy_report(request.as_estimate, model), model, request, timer=timer)


def estimate_of(candidate: Candidate, model: str) -> StrategyEstimate:
    """A new estimate of a candidate's plan, under its allocator settings."""
    conf = AllocatorConf.parse(candidate.allocator_conf)
    host = candidate.host_available_bytes
    return estimate_plan(resolve(model), candidate.plan, find_gpu(candidate.gpu), conf=conf, host_memory_bytes=host)
