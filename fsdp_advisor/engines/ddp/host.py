"""Host memory under DDP. Only an optimizer that updates parameters on the host, or keeps its state there, needs any."""

from __future__ import annotations

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory, page_locked
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Host memory of one node: pinned copies of the parameters and gradients that are updated on the host, and pageable optimizer
    states.
    """
    optimizer, pinned, pageable = optimizer_of(plan), 0, 0
    for p, count in profile.counted_parameters():
        if not p.requires_grad:
            continue
        element = stored_bytes(plan, p)
        kept = count if optimizer.keeps_state_of(p) else 0
        pageable += optimizer.host_state(p.elements, element) * kept
        if optimizer.on_host(p.elements):
            pinned += 2 * page_locked(p.elements * element) * count
            pageable += optimizer.all_state_storages(p, p.shape, element).exact * kept
    return HostMemory(pinned=pinned * plan.ranks_per_node, pageable=pageable * plan.ranks_per_node)
