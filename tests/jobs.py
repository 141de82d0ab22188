"""Plans for catalogued models, each with the tape that it replays: the input of tests of programs and their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor import estimate
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import StepOperations, step_operations
from fsdp_advisor.memory.live import StepPeak, step_peak
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.program.instructions import StepProgram
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tape_keys import tape_key_of

MODELS = (
    "meta-llama/Llama-2-7b-hf", "openai-community/gpt2", "google/gemma-3-1b-pt", "google-t5/t5-small", "openai/whisper-tiny",
    "mistralai/Mixtral-8x7B-v0.1", "google-bert/bert-base-uncased",
)  # fmt: skip
ENGINES = (
    ("ddp", "ddp", "none"), ("zero2", "fsdp2", "none"), ("zero3", "fsdp2", "none"), ("hsdp", "fsdp2", "none"),
    ("zero3", "fsdp2", "parameters"), ("zero2", "fsdp1", "none"), ("zero3", "fsdp1", "none"), ("zero3", "fsdp1", "parameters"),
    ("zero1", "deepspeed", "none"), ("zero2", "deepspeed", "none"), ("zero3", "deepspeed", "none"),
    ("zero1", "deepspeed", "optimizer"), ("zero2", "deepspeed", "optimizer"), ("zero3", "deepspeed", "parameters"),
)  # fmt: skip
"""(strategy, backend, offload) of every engine."""

Job = tuple[Profile, Tape, Plan]


class NotCatalogued(Exception):
    """The catalog has no tape for the plan."""


def job(model: str, strategy: str, backend: str, offload: str = "none", **options: Any) -> Job:
    """A plan on four ranks at 256 tokens, unless `options` say otherwise. Raises NotCatalogued."""
    profile = resolve(model).profile
    assert profile is not None
    nodes = 2 if strategy == "hsdp" else 1
    chosen = {"model": model, "gpus": 4, "nnodes": nodes, "strategy": strategy, "backend": backend, "offload": offload}
    seq_len = min(options.pop("seq_len", 256), profile.max_seq_len or 256)
    plan = plans(make_request({**chosen, **options}), seq_len=seq_len)[0]
    variant = tape_key_of(plan)
    known = [v.name for v in (variant, replace(variant, attention="eager")) if v.name in profile.tapes]
    if not known:
        raise NotCatalogued(variant.name)
    return profile, profile.tapes[known[0]], plan


def program_of(profile: Profile, tape: Tape, plan: Plan) -> StepProgram:
    return step_program(profile, tape, plan)


def peak_of(profile: Profile, tape: Tape, plan: Plan) -> StepPeak:
    return step_peak(step_program(profile, tape, plan), plan.micro_batch_size, plan.seq_len)


def operations_of(profile: Profile, tape: Tape, plan: Plan, **options: Any) -> StepOperations:
    """The allocator's operations. `options`: the keywords of `step_operations`."""
    return step_operations(step_program(profile, tape, plan), plan.micro_batch_size, plan.seq_len, **options)


def row_of_trl(**options: Any) -> StrategyEstimate:
    """The only row of a small TRL job with DDP on one H100."""
    job = {
        "gpu": "H100-80GB", "strategy": "ddp", "framework": "trl", "precision": "bf16-mixed", "seq_len": 64,
        "activation_checkpointing": "none",
    }  # fmt: skip
    (found,) = estimate(**{**job, **options}).estimates
    return found
