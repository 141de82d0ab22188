"""Shared by the tests of advice: a search with a made-up clock, so that no test hangs on the time model's figures."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.advice import Recommendation, recommend_resolved
from fsdp_advisor.advice.batches import batches
from fsdp_advisor.advice.families import Job, families
from fsdp_advisor.advice.judge import Bytes, Judge, Timer
from fsdp_advisor.advice.search import Search
from fsdp_advisor.estimator import estimate_resolved, make_request
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import RecommendRequest
from fsdp_advisor.model.resolve import Resolved, resolve

LLAMA = "meta-llama/Llama-2-7b-hf"
GPT2 = "openai-community/gpt2-large"


def unknown(model: Resolved, plan: Plan, gpu: Gpu) -> None:
    """No time at all."""


def clock(model: Resolved, plan: Plan, gpu: Gpu) -> float:
    """Sharding costs a little, recomputation a third, offload five times; a micro-batch has a fixed cost of its own."""
    per_token = 1e-4 * (1 + 0.05 * ("ddp", "zero1", "zero2", "zero3", "hsdp").index(plan.strategy))
    per_token *= 4 / 3 if plan.activation_checkpointing == "full" else 1
    per_token *= 5 if plan.offload != "none" else 1
    return plan.gradient_accumulation_steps * (0.05 + plan.micro_batch_size * plan.seq_len * per_token) + 0.02


def search_of(timer: Timer = clock, **options: Any) -> Search:
    request = make_request(options, RecommendRequest)
    model = resolve(request.model)
    judge = Judge(
        model=model,
        gpu=find_gpu(request.gpu or "H100-80GB"),
        margin=request.margin,
        timer=timer,
        host_available_bytes=request.host_memory,
        bytes=Bytes(model),
    )
    return Search(
        judge=judge,
        job=Job.of(request, gpus=request.gpus, nnodes=request.nnodes, seq_len=request.seq_len or 2048),
        batches=batches(request, world=request.gpus),
        families=families(request, nnodes=request.nnodes),
    )


def advise(timer: Timer = clock, **options: Any) -> Recommendation:
    request = make_request(options, RecommendRequest)
    model = resolve(request.model)
    return recommend_resolved(estimate_resolved(request.as_estimate, model), model, request, timer=timer)
