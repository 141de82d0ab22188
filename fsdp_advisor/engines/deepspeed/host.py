"""Host memory that DeepSpeed's offload keeps, and notes on what the model of DeepSpeed does not cover.

Read in DeepSpeed 0.19.8: zero/stage_1_and_2.py, zero/stage3.py, ops/adam/cpu_adam.py. c = bytes per element of the compute
dtype; m = bytes per element of the masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from fsdp_advisor.engines.deepspeed.groups import groups
from fsdp_advisor.engines.deepspeed.partitions import (
    largest_parameter,
    offloaded_updates,
    owned_by_rank0,
    owned_elements,
    shard_elements,
    sub_groups,
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
from fsdp_advisor.units import format_bytes


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
    c, m = plan.compute_bytes, master_bytes(plan)
    pinned: list[int] = []
    pageable: list[int] = []
    for group in groups(profile, plan):
        owned = owned_elements(group, plan.shard_degree)
        pinned += [m * owned, m * owned, c * owned]
        pageable += _optimizer_states(plan, owned, m, by_muon=group.by_muon)
        if stage(plan) == 2 and plan.gradient_accumulation_steps > 1 and m == 4:
            pieces = owned_by_rank0(group.parameters, owned)[2]
            pinned += [c * p.elements for p in islice(group.parameters, pieces)]
    return HostTensors(pinned=(*pinned, c * largest_parameter(profile)), pageable=tuple(pageable))


def _optimizer_states(plan: Plan, elements: int, momentum_bytes: int, *, by_muon: bool) -> tuple[int, ...]:
    """Bytes of each state of a flat partition: Muon's momentum, or what the optimizer keeps. `momentum_bytes`: per element."""
    if by_muon:
        return (momentum_bytes * elements,)
    return optimizer_of(plan).deepspeed_host_states(elements, master_bytes(plan))


def _stage_3(profile: Profile, plan: Plan, settings: Settings) -> HostTensors:
    """Pageable: masters. Pinned: gradients, one tensor per sub-group in the masters' dtype and one for all in the model's dtype.

    ``offload_param`` adds the shards of the weights, pinned, in one tensor for each group.
    """
    ranks, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    stepped = sub_groups(profile, plan, settings)
    total = sum(each.elements for each in stepped)
    pinned = [*(m * each.elements for each in stepped), c * total]
    if offloads_parameters(plan):
        pinned += [
            c * sum(shard_elements(p.elements, ranks) for p in group.parameters) for group in groups(profile, plan)
        ]
        pinned += [c * shard_elements(p.elements, ranks) for p in profile.in_order() if not p.trainable]
    pageable = [m * each.elements for each in stepped]
    for each in stepped:
        pageable += _optimizer_states(plan, each.elements, c, by_muon=each.by_muon)
    return HostTensors(pinned=tuple(pinned), pageable=tuple(pageable))


def gather_warnings(profile: Profile, plan: Plan) -> list[str]:
    """A warning about Muon with offload under ZeRO-3, which gathers gradients and momentum of whole sub-groups."""
    if plan.backend != "deepspeed" or stage(plan) < 3:
        return []
    updates = offloaded_updates(profile, plan, settings_of(profile, plan))
    if updates is None or not updates.batches:
        return []
    whole = 2 * updates.gathered_bytes * max(sum(m.elements for m in batch.matrices) for batch in updates.batches)
    return [
        f"DeepSpeed's Muon with offload gathers the gradients and the momentum of a whole sub-group on every GPU: {format_bytes(whole)}, "
        "and buffers of this size. --offload none or --strategy zero2 may need less, as does a smaller sub_group_size, which is not "
        "modelled"
    ]


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
