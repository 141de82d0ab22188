"""Loading under FSDP1 and FSDP2, plain or prepared by accelerate, which leaves fewer ways (`loading` has the sources)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fsdp_advisor.engines.fsdp1.units import flat_elements
from fsdp_advisor.engines.fsdp2.units import shard_shape
from fsdp_advisor.engines.transfer import Loading, Placed, PlacedUnits, Weights, for_each, highest
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.engines.wrapping import EMBEDDING, HEAD, wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.program.builder import AT_ROOT
from fsdp_advisor.program.storages import NO_STORAGES, Storages


def _units(profile: Profile) -> list[Unit]:
    """Layers as they stand in the model, the root last."""
    return [*profile.layers(), profile.root]


# FSDP1


@dataclass(frozen=True, slots=True)
class _Flattened:
    """A unit of FSDP1: its own parameters, its flat parameter, its shard."""

    whole: Storages
    flat: Storages
    shard: Storages


def fsdp1_loadings(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """`FSDP(model)` flattens a unit with `torch.cat` beside its parameters and clones its shard beside both.

    Source: fsdp/_init_utils.py, _init_param_handle_from_module; fsdp/_flat_param.py, flatten_tensors, shard.
    """
    n, k, weights = plan.shard_degree, plan.param_bytes, Weights.of(profile, plan)
    offload = plan.offload == "parameters"

    def flattened(unit: Unit) -> _Flattened:
        elements = flat_elements([p.elements for p in unit.parameters], plan.compute_bytes, n)
        whole = sum((Storages.of(p.elements * k) for p in unit.parameters), NO_STORAGES)
        return _Flattened(whole, Storages.of(elements * k), Storages.of(elements // n * k))

    units = for_each(_units(profile), flattened)
    placed = for_each(units, lambda unit: (_placed(unit.whole + unit.flat, unit.shard, offload=offload),))
    shards = sum(unit.shard.rounded for unit in units)
    gpu, kept = highest(placed) + buffers(profile).rounded, shards if offload else 0
    yield Loading.of(
        plan,
        "every_rank",
        "from_pretrained on every rank; FSDP(model, device_id=...) moves one unit at a time",
        gpu,
        max(weights.copy, kept),
        mapped_bytes=weights.mapped,
        placed=placed,
    )
    yield Loading.of(
        plan,
        "rank0",
        "rank 0 alone loads, the others build on the meta device; FSDP(model, device_id=..., sync_module_states=True, "
        "param_init_fn=lambda m: m.to_empty(device=..., recurse=False))",
        gpu,
        max(weights.copy, kept),
        kept,
        mapped_bytes=weights.mapped,
        placed=placed,
    )
    yield _cpu_ram_efficient(plan, gpu, weights, kept, placed)
    if plan.prepared:  # accelerate always gives a device_id
        return
    remaining, made, host = weights.copy, 0, 0
    for unit in units:
        host = max(host, remaining + made + unit.flat.rounded + unit.shard.rounded)
        remaining, made = max(0, remaining - unit.whole.rounded), made + unit.shard.rounded
    yield Loading.of(
        plan,
        "every_rank_without_device_id",
        "from_pretrained on every rank; FSDP(model) without device_id shards on the CPU, then .to(device)",
        (0 if offload else shards) + buffers(profile).rounded,
        host,
        mapped_bytes=weights.mapped,
    )


def _placed(passing: Storages, shard: Storages, *, offload: bool) -> Placed:
    """With offload each shard goes to the host as soon as it is made."""
    return Placed(passing=passing + shard) if offload else Placed(passing=passing, kept=shard)


def _cpu_ram_efficient(plan: Plan, gpu: int, weights: Weights, kept: int, placed: PlacedUnits) -> Loading:
    """accelerate's flag, which transformers 5 does not honour: every rank's from_pretrained loads all the same.

    Source: transformers/modeling_utils.py, _load_pretrained_model (5.23); huggingface/transformers#43749. Run: both ranks of
    two held the whole converted model.
    """
    return Loading.of(
        plan,
        "cpu_ram_efficient_loading",
        "fsdp_cpu_ram_efficient_loading: true (with transformers 5 every rank still loads a copy)",
        gpu,
        max(weights.copy, kept),
        mapped_bytes=weights.mapped,
        placed=placed,
    )


# FSDP2


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A unit of FSDP2, tensor by tensor: whole, and rank 0's shard. `parameters` are the same tensors."""

    parameters: tuple[Parameter, ...]
    whole: tuple[Storages, ...]
    shards: tuple[Storages, ...]

    @classmethod
    def of(cls, unit: Unit, plan: Plan) -> _Sharded:
        k = plan.param_bytes
        shards = (prod(shard_shape(p.shape, plan.shard_degree)) for p in unit.parameters)
        return cls(
            unit.parameters,
            tuple(Storages.of(p.elements * k) for p in unit.parameters),
            tuple(Storages.of(elements * k) for elements in shards),
        )

    @property
    def shard(self) -> Storages:
        return sum(self.shards, NO_STORAGES)


def fsdp2_loadings(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """`fully_shard` moves a unit to the GPU and copies its shards out; a full state dict comes one tensor at a time.

    Source: fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device; _fsdp_param.py, _init_sharded_param;
    distributed/_state_dict_utils.py, _broadcast_state_dict; accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict.
    """
    weights, offload = Weights.of(profile, plan), plan.offload == "parameters"

    def moved(unit: Unit) -> tuple[Placed, ...]:
        one = _Sharded.of(unit, plan)
        return (_placed(sum(one.whole, NO_STORAGES), one.shard, offload=offload),)

    units = for_each(_units(profile), lambda unit: _Sharded.of(unit, plan))
    held, shards = buffers(profile).rounded, sum(for_each(units, lambda unit: unit.shard.rounded))
    kept, on_gpu = (shards, 0) if offload else (0, shards)
    unit_by_unit = for_each(_wrapped(profile, plan), moved)
    scattered = (
        *for_each(units, lambda unit: _scattered(unit, plan)),
        *for_each(units, lambda unit: _scattered_again(unit, plan)),
    )
    efficient = _cpu_ram_efficient(plan, highest(scattered) + held, weights, kept, scattered)
    yield Loading.of(
        plan,
        "every_rank",
        "from_pretrained on every rank; fully_shard moves one unit at a time",
        highest(unit_by_unit) + held,
        max(weights.copy, kept),
        mapped_bytes=weights.mapped,
        placed=unit_by_unit,
    )
    if plan.prepared:  # it tells parameters apart by their addresses, and on the meta device they have none
        yield efficient
        return
    largest_shard = max(for_each(units, lambda unit: max((shard.rounded for shard in unit.shards), default=0)))
    yield Loading.of(
        plan,
        "sharded",
        "build on the meta device, fully_shard, to_empty; dcp.load with HuggingFaceStorageReader: each rank reads its own rows",
        on_gpu + held,
        kept + (largest_shard if weights.copy and not offload else 0),
        mapped_bytes=weights.mapped,
    )
    sent = (
        *(() if offload else for_each(units, lambda unit: (Placed(kept=unit.shard),))),
        *for_each(units, lambda unit: tuple(Placed(passing=whole) for whole in unit.whole)),
    )
    beside = highest(sent) if offload else 0
    yield Loading.of(
        plan,
        "rank0",
        "rank 0 alone loads, all build on the meta device, fully_shard, to_empty; "
        "set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)",
        highest(sent) + held,
        weights.copy + kept + beside,
        kept + beside,
        mapped_bytes=weights.mapped,
        placed=sent,
    )
    yield efficient


def _wrapped(profile: Profile, plan: Plan) -> list[Unit]:
    """The units in the order in which they are wrapped: layers, then what is made of the root, itself last."""
    wrapping = wrapping_for(profile, plan)
    parts = [wrapping.parts[place].unit for place in (EMBEDDING, HEAD, AT_ROOT) if place in wrapping.parts]
    return parts if wrapping.whole else [*profile.layers(), *parts]


def _scattered(unit: _Sharded, plan: Plan) -> tuple[Placed, ...]:
    """Rank 0 sends each tensor whole, then in chunks, of which those that are too short are copied with padding.

    Source: accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict; torch/distributed/tensor/placement_types.py,
    Shard._shard_tensor.
    """
    n, placed = plan.shard_degree, []
    for p, whole, shard in zip(unit.parameters, unit.whole, unit.shards, strict=True):
        rows = p.shape[0] if p.shape else 1
        padded = shard * (n - rows // -(-rows // n))
        placed.append(_placed(whole + padded, shard, offload=plan.offload == "parameters"))
    return tuple(placed)


def _scattered_again(unit: _Sharded, plan: Plan) -> tuple[Placed, ...]:
    """A tied tensor comes under each of its names, until the model is tied again."""
    again = zip(unit.parameters, _scattered(unit, plan), strict=True)
    return tuple(Placed(passing=one.passing + one.kept) for p, one in again for _ in p.tied)
