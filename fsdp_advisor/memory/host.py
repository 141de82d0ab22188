"""Host memory per node: what offload keeps there, and what loading a model takes.

PyTorch offload (FSDP `CPUOffloadPolicy` / `CPUOffload`) keeps each rank's shard of parameters, gradients and optimizer states
in host memory, parameters and gradients pinned; DeepSpeed's part is `deepspeed_host`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fsdp_advisor.memory import deepspeed_host, optimizers
from fsdp_advisor.memory.held import NOTHING, Held
from fsdp_advisor.memory.schedules.fsdp2 import shard_shape
from fsdp_advisor.memory.schedules.units import total
from fsdp_advisor.models.profile import Profile, Unit
from fsdp_advisor.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes per node. `pinned` and `pageable` in the steady state; loading as the weights' own bytes, one copy or one per rank."""

    pinned: int = 0
    pageable: int = 0
    loading_one_copy: int = 0
    loading_every_rank: int = 0

    @property
    def steady(self) -> int:
        return self.pinned + self.pageable

    @property
    def loading_peak(self) -> int:
        """Every rank with a copy of its own, beside nothing else: states are made after loading."""
        return max(self.loading_every_rank, self.steady)


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Of one node of the plan. The loading figures are `from_pretrained` in the dtype the parameters are kept in."""
    copy = profile.parameters * plan.param_bytes
    ranks = plan.ranks_per_node
    if plan.backend == "deepspeed":
        host = deepspeed_host.host(profile, plan)
        every = ranks * host.loaded_bytes
        pinned = host.bytes_per_node - host.pageable_bytes_per_node
        return HostMemory(
            pinned=pinned,
            pageable=host.pageable_bytes_per_node,
            loading_one_copy=host.loaded_bytes,
            loading_every_rank=every,
        )
    if plan.offload == "none":
        return HostMemory(loading_one_copy=copy, loading_every_rank=copy * ranks)

    def weights_and_gradients(unit: Unit) -> Held:
        result = NOTHING
        for p in unit.parameters:
            n = Held.of(_elements(p.shape, plan) * plan.param_bytes)
            result += n * 2 if p.trainable else n
        return result

    def states(unit: Unit) -> Held:
        result = NOTHING
        for p in unit.parameters:
            if p.trainable:
                result += optimizers.kept(plan.optim, shard_shape(p.shape, plan.shard_degree), plan.param_bytes)
        return result

    return HostMemory(
        pinned=ranks * total(profile, weights_and_gradients).exact,
        pageable=ranks * total(profile, states).exact,
        loading_one_copy=copy,
        loading_every_rank=copy * ranks,
    )


def _elements(shape: tuple[int, ...], plan: Plan) -> int:
    return prod(shard_shape(shape, plan.shard_degree))
