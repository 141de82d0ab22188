"""Host memory under PyTorch's own offload: `CPUOffloadPolicy` (FSDP2) and `CPUOffload` (FSDP1)."""

from __future__ import annotations

from fsdp_advisor.engines.fsdp_shards import shard_bytes, shard_shape
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import is_sharded, stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Host memory of one node. Each rank keeps its shard there: pinned parameters and gradients, pageable optimizer states. Parameters that
    FSDP2 does not shard stay on the GPU.

    FSDP1 shards a unit's flat parameter instead of each parameter's rows; its padding is not counted.
    """
    if plan.offload == "none":
        return HostMemory()
    optimizer = optimizer_of(plan)
    pinned = pageable = 0
    for p, count in profile.counted_parameters():
        if not is_sharded(p, plan):
            continue
        shard = shard_bytes(p, plan) * count
        pinned += 2 * shard if p.trainable else shard
        if optimizer.keeps_state_of(p):
            local = shard_shape(p.shape, plan.shard_degree)
            pageable += optimizer.all_state_storages(p, local, stored_bytes(plan, p)).exact * count
    return HostMemory(pinned=pinned * plan.ranks_per_node, pageable=pageable * plan.ranks_per_node)
