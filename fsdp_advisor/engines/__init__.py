"""One schedule per backend: where units are gathered and freed, where gradients appear, are reduced and dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from fsdp_advisor.engines import wrapping
from fsdp_advisor.engines.ddp.schedule import DdpSchedule
from fsdp_advisor.engines.deepspeed import host as deepspeed_host
from fsdp_advisor.engines.deepspeed.schedule import DeepspeedSchedule
from fsdp_advisor.engines.fsdp1.schedule import Fsdp1Schedule
from fsdp_advisor.engines.fsdp2.schedule import Fsdp2Schedule
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.replay import Schedule
from fsdp_advisor.memory.storages import States
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_named

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
    failure = optimizer_named(plan.optim).fsdp2_step_failure
    if failure and plan.backend == "fsdp2" and plan.framework != "trainer":
        notes.append(failure)
    return notes + wrapping.not_modelled(profile, plan)
