"""Host memory that DeepSpeed's offload keeps, and notes on what the model of DeepSpeed does not cover.

Read in DeepSpeed 0.19.8: zero/stage_1_and_2.py, zero/stage3.py, ops/adam/cpu_adam.py. c = bytes per element of the compute
dtype; m = bytes per element of the masters.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.engines.deepspeed.partitions import (
    flat_elements,
    flat_partitions,
    largest_parameter,
    owned_by_rank0,
    shard_elements,
)
from fsdp_advisor.engines.deepspeed.settings import (
    Settings,
    master_bytes,
    offloads_optimizer,
    offloads_parameters,
    settings_of,
    stage,
)
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.host import HostMemory, page_locked
from fsdp_advisor.model.fp32_modules import keeps_modules_in_fp32
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.optimizers import optimizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTensors:
    """Bytes of each tensor that rank 0 keeps in host memory from step to step."""

    pinned: tuple[int, ...] = ()
    pageable: tuple[int, ...] = ()


def host_memory(profile: Profile, plan: Plan) -> HostMemory:
    """Host memory of one node. Each pinned tensor is rounded up to the bytes that torch locks for it."""
    tensors = host_tensors(profile, plan, settings_of(profile, plan))
    return HostMemory(
        pinned=plan.ranks_per_node * sum(map(page_locked, tensors.pinned)),
        pageable=plan.ranks_per_node * sum(tensors.pageable),
    )


def host_tensors(profile: Profile, plan: Plan, settings: Settings) -> HostTensors:
    """Tensors in host memory under ``offload_optimizer`` and ``offload_param`` (stage 3) to the CPU.

    ``pin_memory`` is true, which is the default.
    """
    if not offloads_optimizer(plan):
        return HostTensors()
    return _stage_3(profile, plan, settings) if stage(plan) == 3 else _stages_1_and_2(profile, plan)


def _stages_1_and_2(profile: Profile, plan: Plan) -> HostTensors:
    """Pinned: masters, their gradients, a copy of the updated weights for the GPU, a buffer of the largest parameter's size.

    Stage 2 with accumulation also keeps every gradient that rank 0 owns a part of. Low-precision masters accumulate in their
    own gradient instead (async_accumulate_grad_in_cpu_via_gpu).
    """
    ranks, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    owned = flat_elements(profile.trainable_parameters, ranks) // ranks
    trainable = [p for p in profile.in_order() if p.trainable]
    pinned = [m * owned, m * owned, c * owned, c * largest_parameter(profile)]
    if stage(plan) == 2 and plan.gradient_accumulation_steps > 1 and m == 4:
        pieces = owned_by_rank0(trainable, owned)[2]
        pinned += [c * p.elements for p in trainable[:pieces]]
    return HostTensors(pinned=tuple(pinned), pageable=optimizer_of(plan).deepspeed_host_states(owned, m))


def _stage_3(profile: Profile, plan: Plan, settings: Settings) -> HostTensors:
    """Pageable: masters. Pinned: gradients, one tensor per sub-group in the masters' dtype and one for all in the model's dtype.

    ``offload_param`` adds the shards of the weights, pinned.
    """
    ranks, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    groups = flat_partitions(profile, plan, settings)
    pinned = [*(m * elements for elements in groups), c * sum(groups)]
    if offloads_parameters(plan):
        pinned.append(c * sum(groups))
        pinned += [c * shard_elements(p.elements, ranks) for p in profile.in_order() if not p.trainable]
    optimizer = optimizer_of(plan)
    states = [
        n_bytes for elements in groups for n_bytes in optimizer.deepspeed_host_states(elements, master_bytes(plan))
    ]
    return HostTensors(pinned=tuple(pinned), pageable=(*(m * elements for elements in groups), *states))


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what a DeepSpeed estimate leaves out or assumes, one sentence each."""
    notes = []
    if keeps_modules_in_fp32(profile):
        notes.append("modules that transformers keeps in fp32 under DeepSpeed (_keep_in_fp32_modules) count as bf16")
    optimizer = optimizer_of(plan)
    if stage(plan) < 3 or not optimizer.is_deepspeeds:
        notes += optimizer.deepspeed_notes
    if stage(plan) == 2:
        notes.append(
            "rank 0 owns the model's first parameters; the last rank holds its gradients from the start of backward"
        )
    if stage(plan) == 3 and plan.activation_checkpointing != "none":
        notes.append("ZeRO-3's gathered parameters under activation checkpointing are within a few per cent")
    if plan.offload_device == "nvme":
        notes.append("NVMe offload: the host's swap buffers are not modelled, so its memory is unknown")
    if plan.offload == "parameters" and stage(plan) < 3:
        notes.append("DeepSpeed offloads parameters only under ZeRO-3; here only the optimizer is offloaded")
    if plan.precision == "bf16" and offloads_optimizer(plan) and not optimizer.is_cpu_adam:
        notes.append("DeepSpeed refuses bf16 masters with offload unless the optimizer is DeepSpeedCPUAdam")
    return notes
