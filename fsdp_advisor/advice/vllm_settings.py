"""Settings of colocated vLLM with which it starts, where a request for a recommendation leaves them open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.advice.search_space import base_plan
from fsdp_advisor.assumptions import gpu_of, sequence_length
from fsdp_advisor.engines.vllm import SETTINGS, starting_settings
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolved import Resolved


def with_vllm_started(request: RecommendRequest, model: Resolved) -> RecommendRequest:
    """The request with settings of colocated vLLM with which it starts, as `assumed` values. Settings that are given stay, and so do those
    of a search that varies the GPUs or the length, on which they depend.
    """
    varies = request.find in ("gpus", "gpu-type", "sequence")
    if request.task != "grpo" or not request.use_vllm or request.vllm_mode != "colocate" or varies:
        return request
    profile = model.adapted(adaptation_of(request)).profile
    if profile is None:
        return request
    plan = base_plan(request, gpus=request.gpus, nnodes=request.nnodes, seq_len=sequence_length(request, profile)[0])
    settings: dict[str, Any] = starting_settings(
        profile, plan, gpu_of(request)[0], [o for o in SETTINGS if o not in request.given]
    )
    return replace(request, **settings, assumed=request.assumed | set(settings)) if settings else request
