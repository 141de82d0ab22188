"""Host memory per node: what offload keeps there from step to step. What loading and saving take is in `loading` and `saving`.

PyTorch offload (FSDP `CPUOffloadPolicy` / `CPUOffload`) keeps each rank's shard of parameters, gradients and optimizer states
in host memory, parameters and gradients pinned; DeepSpeed's part is `deepspeed_host`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdp_advisor.engines.deepspeed import host as deepspeed_host
from fsdp_advisor.engines.fsdp2.units import shard_shape
from fsdp_advisor.engines.units import total
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes per node in the steady state."""

    pinned: int = 0
    pageable: int = 0

    @property
    def steady(self) -> int:
        return self.pinned + self.pageable


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Of one node of the plan."""
    return _host_memory(profile, plan.any_batch)


@lru_cache(maxsize=2048)
def _host_memory(profile: Profile, plan: Plan) -> HostMemory:
    ranks = plan.ranks_per_node
    if plan.backend == "deepspeed":
        host = deepspeed_host.host(profile, plan)
        pinned = host.bytes_per_node - host.pageable_bytes_per_node
        return HostMemory(pinned=pinned, pageable=host.pageable_bytes_per_node)
    if plan.offload == "none":
        return HostMemory()

    def weights_and_gradients(unit: Unit) -> Storages:
        result = NO_STORAGES
        for p in unit.parameters:
            n = Storages.of(_elements(p.shape, plan) * plan.param_bytes)
            result += n * 2 if p.trainable else n
        return result

    optimizer = optimizer_named(plan.optim)

    def states(unit: Unit) -> Storages:
        result = NO_STORAGES
        for p in unit.parameters:
            if p.trainable:
                result += optimizer.state_storages(p, shard_shape(p.shape, plan.shard_degree), plan.param_bytes)
        return result

    return HostMemory(
        pinned=ranks * total(profile, weights_and_gradients).exact,
        pageable=ranks * total(profile, states).exact,
    )


def _elements(shape: tuple[int, ...], plan: Plan) -> int:
    return prod(shard_shape(shape, plan.shard_degree))
