"""One schedule per backend: where units are gathered and freed, where gradients appear, are reduced and dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from fsdp_advisor.memory import deepspeed_host, wrapping
from fsdp_advisor.memory.held import States
from fsdp_advisor.memory.replay import Schedule
from fsdp_advisor.memory.schedules.ddp import DdpSchedule
from fsdp_advisor.memory.schedules.deepspeed import DeepspeedSchedule
from fsdp_advisor.memory.schedules.fsdp1 import Fsdp1Schedule
from fsdp_advisor.memory.schedules.fsdp2 import Fsdp2Schedule
from fsdp_advisor.models.profile import Profile
from fsdp_advisor.plan import Plan

_SCHEDULES: dict[str, Callable[[Profile, Plan], Schedule]] = {
    "ddp": DdpSchedule,
    "fsdp2": Fsdp2Schedule,
    "fsdp1": Fsdp1Schedule,
    "deepspeed": DeepspeedSchedule,
}


def schedule_for(profile: Profile, plan: Plan) -> Schedule:
    """The schedule of the plan's backend."""
    return _SCHEDULES[plan.backend](profile, plan)


def states_of(profile: Profile, plan: Plan) -> States:
    """What the plan's backend keeps on rank 0 from step to step."""
    return _states(profile, plan.any_step)


@lru_cache(maxsize=1024)
def _states(profile: Profile, plan: Plan) -> States:
    return schedule_for(profile, plan).states


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """What the plan's schedule leaves out or assumes."""
    notes = deepspeed_host.not_modelled(plan) if plan.backend == "deepspeed" else []
    if plan.backend == "fsdp2" and plan.optim == "adafactor" and plan.framework != "trainer":
        notes.append("torch.optim.Adafactor, as of torch 2.13, does not run on FSDP2's shards")
    return notes + wrapping.not_modelled(profile, plan)
