"""One schedule per backend: where units are gathered and freed, where gradients appear, are reduced and dropped."""

from __future__ import annotations

from fsdp_advisor.memory.replay import Schedule
from fsdp_advisor.memory.schedules.ddp import DdpSchedule
from fsdp_advisor.memory.schedules.fsdp1 import Fsdp1Schedule
from fsdp_advisor.memory.schedules.fsdp2 import Fsdp2Schedule
from fsdp_advisor.models.profile import Profile
from fsdp_advisor.plan import Plan


def schedule_for(profile: Profile, plan: Plan) -> Schedule:
    """The schedule of the plan's backend."""
    match plan.backend:
        case "ddp":
            return DdpSchedule(profile, plan)
        case "fsdp2":
            return Fsdp2Schedule(profile, plan)
        case "fsdp1":
            return Fsdp1Schedule(profile, plan)
        case _:
            raise NotImplementedError(plan.backend)
