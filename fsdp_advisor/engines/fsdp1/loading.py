"""Loading a model under FSDP1, in plain PyTorch or through accelerate (which always passes a device_id).

Read in torch 2.13, transformers 5.23 and accelerate 1.15. Host bytes and bytes of the CPU backend were measured in real runs
over gloo; copies to a GPU were not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fsdp_advisor.engines.fsdp1.units import flat_bytes, unit_elements
from fsdp_advisor.engines.quantized_loading import is_quantized_on_load, on_gpu, on_host, usual_first
from fsdp_advisor.engines.transfer import (
    CPU_RAM_EFFICIENT_LOADING,
    LoadedCheckpoint,
    LoadMethod,
    peak_bytes,
    private_bytes,
)
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.engines.wrapping import wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.dtypes import loaded_bytes
from fsdp_advisor.program.storages import NO_STORAGES, Storages, WeightTransfer


class FlattenedUnit(NamedTuple):
    """One unit's storages while it is flattened: its original parameters, its flat parameter, and rank 0's shard.

    `private_bytes`: bytes of the original parameters that are no views of the checkpoint's file.
    """

    parameters: Storages
    flat: Storages
    shard: Storages
    private_bytes: int


def load_methods(profile: Profile, plan: Plan) -> tuple[LoadMethod, ...]:
    """The methods of loading under FSDP1, the simplest to set up first.

    `FSDP(model)` flattens a unit with `torch.cat` while its parameters are alive, then clones its shard while the parameters
    and the flat parameter are alive.
    Source: fsdp/_init_utils.py, _init_param_handle_from_module; fsdp/_flat_param.py, flatten_tensors, shard.
    """
    offload = plan.offload == "parameters"
    units = _flattened_units(profile, plan)
    transfers = tuple(
        [WeightTransfer.of_shard(unit.parameters + unit.flat, unit.shard, offload=offload) for unit in units]
    )
    shards = sum(unit.shard.rounded for unit in units)
    gpu = peak_bytes(transfers) + buffers(profile, plan.param_bytes).rounded
    shards_on_host = shards if offload else 0
    if is_quantized_on_load(profile):
        host = on_host(profile, plan, gpu_bytes=gpu, shards_on_host=shards_on_host, transfers=transfers)
        return usual_first(plan, _on_gpu(profile, plan, units, shards_on_host), host)
    checkpoint = LoadedCheckpoint.of(profile, plan)
    loaded = max(checkpoint.private_bytes, shards_on_host)

    def unit_by_unit(way: str, how: str, other_ranks_host_bytes: int) -> LoadMethod:
        return LoadMethod(
            way=way,
            how=how,
            gpu_bytes=gpu,
            first_rank_host_bytes=loaded,
            other_ranks_host_bytes=other_ranks_host_bytes,
            ranks_per_node=plan.ranks_per_node,
            mapped_bytes=checkpoint.mapped_bytes,
            transfers=transfers,
        )

    methods = (
        unit_by_unit(
            "every_rank", "from_pretrained on every rank; FSDP(model, device_id=...) moves one unit at a time", loaded
        ),
        unit_by_unit(
            "rank0",
            "only rank 0 loads, the others build on the meta device; FSDP(model, device_id=..., sync_module_states=True, "
            "param_init_fn=lambda m: m.to_empty(device=..., recurse=False))",
            shards_on_host,
        ),
        unit_by_unit("cpu_ram_efficient_loading", CPU_RAM_EFFICIENT_LOADING, loaded),
    )
    if plan.uses_accelerate:
        return methods
    return (*methods, _without_device_id(profile, plan, units, checkpoint))


def _on_gpu(profile: Profile, plan: Plan, units: Sequence[FlattenedUnit], shards_on_host: int) -> LoadMethod:
    """The method that quantizes the whole base on each GPU before `FSDP(model)` flattens and shards it there."""
    offload, other = plan.offload == "parameters", buffers(profile, plan.param_bytes).rounded
    transfers = [
        transfer
        for unit in units
        for transfer in WeightTransfer.of_loaded(unit.parameters, unit.shard, temporaries=unit.flat, offload=offload)
    ]
    return on_gpu(
        profile,
        plan,
        whole_bytes=sum(unit.parameters.rounded for unit in units) + other,
        gpu_bytes=peak_bytes(transfers) + other,
        host_bytes=shards_on_host,
        transfers=tuple(transfers),
    )


def _without_device_id(
    profile: Profile, plan: Plan, units: Sequence[FlattenedUnit], checkpoint: LoadedCheckpoint
) -> LoadMethod:
    """`FSDP(model)` flattens and shards one unit at a time on the CPU. Only the shards move to the GPU."""
    remaining, shards, host = checkpoint.kept_bytes, 0, checkpoint.private_bytes
    for unit in units:
        host = max(host, remaining + shards + unit.flat.rounded + unit.shard.rounded)
        remaining -= unit.private_bytes
        shards += unit.shard.rounded
    return LoadMethod(
        way="every_rank_without_device_id",
        how="from_pretrained on every rank; FSDP(model) without device_id shards on the CPU, then .to(device)",
        gpu_bytes=(0 if plan.offload == "parameters" else shards) + buffers(profile, plan.param_bytes).rounded,
        first_rank_host_bytes=host,
        other_ranks_host_bytes=host,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
    )


def _flattened_units(profile: Profile, plan: Plan) -> list[FlattenedUnit]:
    n = plan.shard_degree

    @cache
    def flattened(unit: Unit) -> FlattenedUnit:
        elements = unit_elements(unit, plan)
        k = max((loaded_bytes(plan, p) for p in unit.parameters), default=plan.param_bytes)
        parameters = sum((Storages.of(p.elements * loaded_bytes(plan, p)) for p in unit.parameters), NO_STORAGES)
        # accelerate makes the shard fp32 once all units are shards; it is counted as fp32 from the start
        return FlattenedUnit(
            parameters,
            Storages.of(elements * k),
            Storages.of(elements // n * flat_bytes(unit, plan)),
            sum(private_bytes(profile, plan, p) for p in unit.parameters),
        )

    return [flattened(unit) for unit in wrapping_for(profile, plan).in_order(profile)]
