"""Loading a model under FSDP2, in plain PyTorch or through accelerate, which supports fewer methods.

Read in torch 2.13, transformers 5.23 and accelerate 1.15. Host bytes and bytes of the CPU backend were measured in real runs
over gloo; copies to a GPU were not measured. N = ranks that share one copy of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fsdp_advisor.engines.fsdp_shards import shard_bytes
from fsdp_advisor.engines.quantized_loading import is_quantized_on_load, on_gpu, on_host, usual_first
from fsdp_advisor.engines.transfer import (
    CPU_RAM_EFFICIENT_LOADING,
    LoadedCheckpoint,
    LoadMethod,
    peak_bytes,
)
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.engines.wrapping import wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.experts import are_copied
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.policies.dtypes import is_sharded, stored_bytes
from fsdp_advisor.program.storages import NO_STORAGES, Storages, WeightTransfer

Transfers = tuple[WeightTransfer, ...]


class ShardedParameter(NamedTuple):
    """One parameter's storage, and rank 0's shard of it."""

    parameter: Parameter
    whole: Storages
    shard: Storages


@dataclass(frozen=True, slots=True, eq=False)
class ShardedUnit:
    """One unit's parameters. Compares by identity, because layers of one kind share one object."""

    parameters: tuple[ShardedParameter, ...]

    @property
    def whole(self) -> Storages:
        return sum((p.whole for p in self.parameters), NO_STORAGES)

    @property
    def shard(self) -> Storages:
        return sum((p.shard for p in self.parameters), NO_STORAGES)


def load_methods(profile: Profile, plan: Plan) -> tuple[LoadMethod, ...]:
    """The methods of loading under FSDP2, the simplest to set up first.

    The methods that build on the meta device do not work with accelerate: it identifies parameters by their addresses, and
    meta tensors have none.
    """
    if is_quantized_on_load(profile):
        return _quantized(profile, plan)
    checkpoint, units = LoadedCheckpoint.of(profile, plan), _sharded_units(profile, plan)
    loaded = max(checkpoint.private_bytes, _shards_bytes(units) if plan.offload == "parameters" else 0)
    by_unit, scattered = _unit_transfers(profile, plan), _scatter_transfers(units, plan)
    every_rank = LoadMethod(
        way="every_rank",
        how="from_pretrained on every rank; fully_shard moves one unit at a time",
        gpu_bytes=peak_bytes(by_unit) + buffers(profile, plan.param_bytes).rounded,
        first_rank_host_bytes=loaded,
        other_ranks_host_bytes=loaded,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
        transfers=by_unit,
    )
    efficient = LoadMethod(
        way="cpu_ram_efficient_loading",
        how=CPU_RAM_EFFICIENT_LOADING,
        gpu_bytes=peak_bytes(scattered) + buffers(profile, plan.param_bytes).rounded,
        first_rank_host_bytes=loaded,
        other_ranks_host_bytes=loaded,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
        transfers=scattered,
    )
    if plan.uses_accelerate:
        return every_rank, efficient
    return every_rank, *_from_meta_device(profile, plan, units, checkpoint), efficient


def _quantized(profile: Profile, plan: Plan) -> tuple[LoadMethod, ...]:
    """The methods for a base that bitsandbytes quantizes. Packed weights that are not sharded cannot be loaded on the host: FSDP2 leaves
    them there.

    Source: fsdp/_fully_shard/_fsdp_init.py, _get_managed_states, `ignored_params`.
    """
    offload = plan.offload == "parameters"
    whole, ignored = NO_STORAGES, NO_STORAGES
    sharding: list[WeightTransfer] = []
    freeing: list[WeightTransfer] = []
    for unit in map(_sharding(plan), wrapping_for(profile, plan).in_order(profile)):
        managed = ShardedUnit(tuple(p for p in unit.parameters if is_sharded(p.parameter, plan)))
        whole += unit.whole
        ignored += sum((p.whole for p in unit.parameters if not is_sharded(p.parameter, plan)), NO_STORAGES)
        shard, free = WeightTransfer.of_loaded(managed.whole, managed.shard, offload=offload)
        sharding.append(shard)
        freeing.append(free)
    other = buffers(profile, plan.param_bytes).rounded
    if plan.uses_accelerate:
        transfers = (WeightTransfer(kept=ignored), *sharding, *freeing)
    else:
        pairs = zip(sharding, freeing, strict=True)
        transfers = (WeightTransfer(kept=ignored), *(transfer for pair in pairs for transfer in pair))
    on_each_gpu = on_gpu(
        profile,
        plan,
        whole_bytes=whole.rounded + other,
        gpu_bytes=peak_bytes(transfers) + other,
        host_bytes=_shards_bytes(_sharded_units(profile, plan)) - ignored.rounded if offload else 0,
        transfers=transfers,
    )
    if ignored.exact:
        return (on_each_gpu,)
    by_unit, shards = _unit_transfers(profile, plan), _shards_bytes(_sharded_units(profile, plan))
    gpu_bytes = peak_bytes(by_unit) + other
    shards_on_host = shards if offload else 0
    on_hosts = on_host(profile, plan, gpu_bytes=gpu_bytes, shards_on_host=shards_on_host, transfers=by_unit)
    return usual_first(plan, on_each_gpu, on_hosts)


def _from_meta_device(
    profile: Profile, plan: Plan, units: Sequence[ShardedUnit], checkpoint: LoadedCheckpoint
) -> tuple[LoadMethod, ...]:
    """The methods that shard an empty model: with `sharded` each rank reads its rows, with `rank0` rank 0 broadcasts them.

    `sharded` finds a weight by its name, so the file must have the model's names: not those of single experts, nor without PEFT's prefixes.
    Source: torch/distributed/checkpoint/default_planner.py, create_default_local_load_plan ("Missing key in checkpoint state_dict").
    """
    offload, shards = plan.offload == "parameters", _shards_bytes(units)
    shards_on_host, shards_on_gpu = (shards, 0) if offload else (0, shards)
    largest_shard = max(p.shard.rounded for unit in units for p in unit.parameters)
    converted_shard = largest_shard if checkpoint.is_converted and not offload else 0
    broadcast = _broadcast_transfers(units, offload=offload)
    broadcast_on_host = peak_bytes(broadcast) if offload else 0
    sharded = LoadMethod(
        way="sharded",
        how="build on the meta device, fully_shard, to_empty; dcp.load with HuggingFaceStorageReader: each rank reads its own rows",
        gpu_bytes=shards_on_gpu + buffers(profile, plan.param_bytes).rounded,
        first_rank_host_bytes=shards_on_host + converted_shard,
        other_ranks_host_bytes=shards_on_host + converted_shard,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
    )
    rank0 = LoadMethod(
        way="rank0",
        how="only rank 0 loads, all build on the meta device, fully_shard, to_empty; "
        "set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)",
        gpu_bytes=peak_bytes(broadcast) + buffers(profile, plan.param_bytes).rounded,
        first_rank_host_bytes=max(checkpoint.private_bytes, checkpoint.kept_bytes + shards_on_host + broadcast_on_host),
        other_ranks_host_bytes=shards_on_host + broadcast_on_host,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
        transfers=broadcast,
    )
    has_other_names = profile.adapter_parameters or any(are_copied(profile, p) for p, _ in profile.counted_parameters())
    return (rank0,) if has_other_names else (sharded, rank0)


def _sharded_units(profile: Profile, plan: Plan) -> list[ShardedUnit]:
    """Every real layer in the model's order, then the root. Layers of one kind are the same object."""
    return [*map(_sharding(plan), (*profile.layers(), profile.root))]


def _shards_bytes(units: Sequence[ShardedUnit]) -> int:
    return sum(p.shard.rounded for unit in units for p in unit.parameters)


def _sharding(plan: Plan) -> Callable[[Unit], ShardedUnit]:
    """A function that shards a unit's parameters and returns the same object for layers of one kind."""

    @cache
    def sharded(unit: Unit) -> ShardedUnit:
        return ShardedUnit(
            tuple(
                ShardedParameter(p, Storages.of(p.elements * stored_bytes(plan, p)), Storages.of(shard_bytes(p, plan)))
                for p in unit.parameters
            )
        )

    return sharded


def _unit_transfers(profile: Profile, plan: Plan) -> Transfers:
    """The transfers of `fully_shard`, which moves each unit to the GPU and copies its shards out.

    Source: fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device; _fsdp_param.py, _init_sharded_param.
    """
    sharded, offload = _sharding(plan), plan.offload == "parameters"

    @cache
    def moved(unit: Unit) -> WeightTransfer:
        return WeightTransfer.of_shard(sharded(unit).whole, sharded(unit).shard, offload=offload)

    return tuple([moved(unit) for unit in wrapping_for(profile, plan).in_order(profile)])


def _broadcast_transfers(units: Sequence[ShardedUnit], *, offload: bool) -> Transfers:
    """The transfers of a broadcast: every rank allocates its shards, then rank 0 broadcasts one whole tensor at a time.

    Source: distributed/_state_dict_utils.py, _broadcast_state_dict.
    """

    @cache
    def shard(unit: ShardedUnit) -> WeightTransfer:
        return WeightTransfer(kept=unit.shard)

    @cache
    def broadcast(unit: ShardedUnit) -> Transfers:
        return tuple(WeightTransfer(temporaries=p.whole) for p in unit.parameters)

    shards = () if offload else [shard(unit) for unit in units]
    return (*shards, *[transfer for unit in units for transfer in broadcast(unit)])


def _scatter_transfers(units: Sequence[ShardedUnit], plan: Plan) -> Transfers:
    """The transfers of accelerate, which moves each whole tensor to rank 0's GPU and scatters it in N padded chunks.

    A tied tensor is scattered once for each of its names; the extra shards are freed when the model is tied again.
    Source: accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict; torch/distributed/tensor/placement_types.py,
    Shard._shard_tensor.
    """
    offload = plan.offload == "parameters"

    @cache
    def scattered(unit: ShardedUnit) -> Transfers:
        return tuple(
            WeightTransfer.of_shard(p.whole + _padded_chunks(p, plan.shard_degree), p.shard, offload=offload)
            for p in unit.parameters
        )

    first = [transfer for unit in units for transfer in scattered(unit)]
    again = [
        WeightTransfer(temporaries=transfer.temporaries + transfer.kept)
        for unit in units
        for p, transfer in zip(unit.parameters, scattered(unit), strict=True)
        for _ in p.parameter.tied
    ]
    return (*first, *again)


def _padded_chunks(p: ShardedParameter, ranks: int) -> Storages:
    """Copies of the chunks that have fewer rows than rank 0's, each as large as rank 0's."""
    rows = p.parameter.shape[0] if p.parameter.shape else 1
    full_chunks = rows // -(-rows // ranks)
    return p.shard * (ranks - full_chunks)
