"""Host memory that offload keeps from step to step. `loading` and `saving` count the temporary memory of their methods."""

from __future__ import annotations

from fsdp_advisor.engines.deepspeed import host as deepspeed
from fsdp_advisor.engines.fsdp2 import host as fsdp2
from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory
from fsdp_advisor.model.profile import Profile


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Host memory of one node between steps, in bytes."""
    match plan.backend:
        case "ddp":
            return HostMemory()  # DDP has no offload
        case "fsdp1" | "fsdp2":
            return fsdp2.host_memory(profile, plan)
        case "deepspeed":
            return deepspeed.host_memory(profile, plan)
        case _:
            return assert_never(plan.backend)
