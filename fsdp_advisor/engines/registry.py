"""Select the engine of a plan: its hooks, the program of its step, its states, and notes on what it does not model."""

from __future__ import annotations

from functools import lru_cache

from fsdp_advisor.engines import wrapping
from fsdp_advisor.engines.ddp.step import DdpStep
from fsdp_advisor.engines.deepspeed import host as deepspeed_host
from fsdp_advisor.engines.deepspeed import partitions
from fsdp_advisor.engines.deepspeed.step import DeepspeedStep
from fsdp_advisor.engines.fsdp1 import units as fsdp1_units
from fsdp_advisor.engines.fsdp1.step import Fsdp1Step
from fsdp_advisor.engines.fsdp2 import units as fsdp2_units
from fsdp_advisor.engines.fsdp2.step import Fsdp2Step
from fsdp_advisor.engines.optimizer_work import optimizer_refusal
from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.program.builder import build_program
from fsdp_advisor.program.instructions import StepProgram
from fsdp_advisor.program.storages import States

PAGED = (
    "paged optimizer state is in CUDA's managed memory, outside needed_bytes: it uses what the GPU has left, and moves to the host "
    "when the GPU is full; host memory counts all of it"
)


def step_of_engine(profile: Profile, plan: Plan) -> DdpStep | Fsdp1Step | Fsdp2Step | DeepspeedStep:
    """The hooks of the plan's backend."""
    match plan.backend:
        case "ddp":
            return DdpStep(profile, plan)
        case "fsdp1":
            return Fsdp1Step(profile, plan)
        case "fsdp2":
            return Fsdp2Step(profile, plan)
        case "deepspeed":
            return DeepspeedStep(profile, plan)
        case _:
            assert_never(plan.backend)


def step_program(profile: Profile, tape: Tape, plan: Plan) -> StepProgram:
    """The program of the plan's step over a tape. It depends on neither micro-batch nor sequence length."""
    return _step_program(profile, tape, plan.without_batch)


@lru_cache(maxsize=64)
def _step_program(profile: Profile, tape: Tape, plan: Plan) -> StepProgram:
    return build_program(profile, tape, step_of_engine(profile, plan), plan.gradient_accumulation_steps)


def states_of(profile: Profile, plan: Plan) -> States:
    """The states that the plan's backend keeps on rank 0 from step to step."""
    return step_of_engine(profile, plan.without_batch).states


def refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the plan's engine cannot train the model; None if it can."""
    match plan.backend:
        case "fsdp1":
            return fsdp1_units.refusal(profile, plan)
        case "deepspeed":
            return partitions.refusal(profile, plan)
        case "fsdp2":
            return fsdp2_units.refusal(profile) or optimizer_refusal(profile, plan)
        case "ddp":
            return None
        case _:
            assert_never(plan.backend)


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what the models of the plan's engine and framework leave out or assume."""
    notes = deepspeed_host.not_modelled(plan) if plan.backend == "deepspeed" else []
    optimizer = optimizer_named(plan.optim)
    if plan.backend == "fsdp2":
        if optimizer.fsdp2 is not None:
            notes.append(optimizer.fsdp2.reason)
        elif optimizer.fsdp2_step_failure and not plan.facts.uses_trainer:
            notes.append(optimizer.fsdp2_step_failure)
    notes += optimizer.notes
    if optimizer.is_paged and plan.offload == "none":
        notes.append(PAGED)
    return notes + wrapping.not_modelled(profile, plan)
