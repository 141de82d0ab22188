"""What DeepSpeed keeps in host memory when it offloads, and what of a plan this package does not model.

Read in DeepSpeed 0.19.8: zero/stage_1_and_2.py, zero/stage3.py, ops/adam/cpu_adam.py; torch 2.13:
CachingHostAllocator.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.engines.deepspeed.buffers import owned_by_rank0
from fsdp_advisor.engines.deepspeed.partitions import flat_elements, shard_elements, sub_groups
from fsdp_advisor.engines.deepspeed.settings import (
    Settings,
    master_bytes,
    offloads_optimizer,
    offloads_parameters,
    settings_of,
    stage,
)
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_named


def page_locked(n_bytes: int) -> int:
    """What torch takes from the host for a pinned tensor: the next power of two, unless ``pinned_max_round_threshold``
    is set.

    >>> page_locked(0), page_locked(1), page_locked(4096), page_locked(4097)
    (0, 1, 4096, 8192)
    """
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Host memory in the steady state. `pinned` and `pageable` are the tensors of rank 0, one entry each, in bytes."""

    ranks_per_node: int
    pinned: tuple[int, ...] = ()
    pageable: tuple[int, ...] = ()

    @property
    def pinned_bytes_per_node(self) -> int:
        return self.ranks_per_node * sum(self.pinned)

    @property
    def pageable_bytes_per_node(self) -> int:
        return self.ranks_per_node * sum(self.pageable)

    @property
    def bytes_per_node(self) -> int:
        """What is taken from the node: pinned tensors with their rounding up to a power of two."""
        return self.ranks_per_node * sum(map(page_locked, self.pinned)) + self.pageable_bytes_per_node


def host(profile: Profile, plan: Plan, settings: Settings | None = None) -> HostBytes:
    """Host memory under ``offload_optimizer`` (and, stage 3, ``offload_param``) to the CPU, ``pin_memory`` true as by
    default.

    Stages 1, 2: pinned masters, gradients, the updated weights on their way back, and a buffer of the largest
    parameter; stage 2 with accumulation keeps every gradient that rank 0 owns any part of. Stage 3: pageable masters;
    pinned gradients in the masters' dtype per sub-group and, all together, in the model's dtype; the weights' shards,
    pinned, if they are offloaded.
    """
    settings = settings or settings_of(profile, plan)
    ranks, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    if not offloads_optimizer(plan):
        return HostBytes(ranks_per_node=plan.ranks_per_node)
    optimizer = optimizer_named(plan.optim)
    pinned: list[int] = []
    pageable: list[int] = []
    if stage(plan) < 3:
        owned = flat_elements(profile.trainable_parameters, ranks) // ranks
        largest = max(p.elements for p in profile.in_order() if p.trainable)
        pinned = [m * owned, m * owned, c * owned, c * largest]
        # low-precision masters accumulate in their own gradient (async_accumulate_grad_in_cpu_via_gpu)
        if stage(plan) == 2 and plan.gradient_accumulation_steps > 1 and m == 4:
            pieces = owned_by_rank0(profile, owned)[2]
            trainable = (p.elements for p in profile.in_order() if p.trainable)
            pinned += [c * n for _, n in zip(range(pieces), trainable, strict=False)]
        pageable = [*optimizer.deepspeed_host_states(owned, m)]
    else:
        groups = [elements for elements, _ in sub_groups(profile, ranks, settings)]
        pinned = [*(m * n for n in groups), c * sum(groups)]
        pageable = [m * n for n in groups] + [n for g in groups for n in optimizer.deepspeed_host_states(g, m)]
        if offloads_parameters(plan):
            pinned.append(c * sum(groups))
            pinned += [c * shard_elements(p.elements, ranks) for p in profile.in_order() if not p.trainable]
    return HostBytes(ranks_per_node=plan.ranks_per_node, pinned=tuple(pinned), pageable=tuple(pageable))


def not_modelled(plan: Plan) -> list[str]:
    """What a DeepSpeed estimate leaves out or assumes, for the reader of the result."""
    notes = ["modules that the model keeps in fp32 under DeepSpeed (keep_in_fp32_modules) count as bf16"]
    optimizer = optimizer_named(plan.optim)
    notes += optimizer.deepspeed_notes
    if stage(plan) == 2:
        notes.append(
            "rank 0 owns the model's first parameters; the last rank holds its gradients from the start of backward"
        )
    if stage(plan) == 3 and plan.activation_checkpointing == "full":
        notes.append("ZeRO-3's gathered parameters under activation checkpointing are within a few per cent")
    if plan.offload_device == "nvme":
        notes.append(
            "NVMe offload: the host's swap buffers are not counted; the host figure is that of offloading to the CPU"
        )
    if plan.offload == "parameters" and stage(plan) < 3:
        notes.append("DeepSpeed offloads parameters under ZeRO-3 only; here the optimizer alone is offloaded")
    if plan.precision == "bf16" and offloads_optimizer(plan) and not optimizer.is_cpu_adam:
        notes.append("DeepSpeed refuses bf16 masters with offload unless the optimizer is DeepSpeedCPUAdam")
    return notes
