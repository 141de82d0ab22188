"""Host memory that offload and paged optimizers keep from step to step.

`loading` and `saving` count the temporary memory of their methods.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_advisor.engines import fsdp_host
from fsdp_advisor.engines.ddp import host as ddp
from fsdp_advisor.engines.deepspeed import host as deepspeed
from fsdp_advisor.engines.registry import states_of
from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory, page_locked
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import ROOT, Tape, value_at
from fsdp_advisor.policies.optimizers import optimizer_of


def host_memory(profile: Profile, plan: Plan, tape: Tape | None = None) -> HostMemory:
    """Host memory of the ranks of a node: offloaded states, paged optimizer states and, if `tape` is given, offloaded activations.

    All of a paged optimizer's states count, because CUDA may move all of them to the host.
    """
    offloaded = _offloaded(profile, plan)
    if tape is not None and plan.activation_offload:
        activations = _activation_bytes(profile, tape, plan) * plan.ranks_per_node
        offloaded = replace(offloaded, pinned=offloaded.pinned + activations)
    if not optimizer_of(plan).is_paged:
        return offloaded
    paged = states_of(profile, plan).paged.exact * plan.ranks_per_node
    return HostMemory(pinned=offloaded.pinned, pageable=offloaded.pageable + paged)


def _activation_bytes(profile: Profile, tape: Tape, plan: Plan) -> int:
    """Bytes that a rank locks in host memory for the tensors that forward copies there."""
    return sum(
        page_locked(value_at(n_bytes, *plan.tape_shape))
        * (1 if segment.stack == ROOT else profile.stacks[segment.stack].counts[segment.layer])
        for segment in tape.segments
        if segment.phase == "forward"
        for n_bytes in segment.host_copies
    )


def _offloaded(profile: Profile, plan: Plan) -> HostMemory:
    match plan.backend:
        case "ddp":
            return ddp.host_memory(profile, plan)
        case "fsdp1" | "fsdp2":
            return fsdp_host.host_memory(profile, plan)
        case "deepspeed":
            return deepspeed.host_memory(profile, plan)
        case _:
            return assert_never(plan.backend)
