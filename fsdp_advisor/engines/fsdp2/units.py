"""The units of PyTorch FSDP2 (`fully_shard`) and their bytes on rank 0.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParam._init_sharded_param` (dim-0 chunks, padded),
`foreach_all_gather`, `foreach_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from fsdp_advisor.engines.fsdp_shards import shard_shape
from fsdp_advisor.engines.optimizer_state import kept_state
from fsdp_advisor.engines.units import buffers, per_unit, recorded_units, root_parts, summed, total_of_policy
from fsdp_advisor.engines.wrapping import Wrapping, head_gathered_by_loss, head_is_alone, takes_root_apart, wrapping_for
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.policies.dtypes import compute_bytes, gradient_bytes, has_8_bit_weights, is_sharded, stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Stepped
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages
from fsdp_advisor.units import format_bytes


class ShardBytes(NamedTuple):
    """Bytes of one parameter's local shard as it is kept, and in the dtype in which it is gathered."""

    stored: int
    computed: int


class UnitBytes(NamedTuple):
    """One unit's storages on rank 0."""

    parameters: Storages
    ignored: Storages  # packed weights that stay whole, on the GPU (`is_sharded`)
    optimizer: Storages
    paged: Storages  # optimizer state in managed memory
    gradients: Storages  # one storage: the reduce-scatter's output; the sharded gradients are views of it
    gather_input: Storages  # flat copy of the shards in the compute dtype; empty if the shards themselves are gathered
    gather_output: Storages
    unsharded: Storages  # the gathered parameters, one storage each, padded
    reduce_input: Storages
    reduce_output: Storages  # empty if the output has the dtype of the gradients and becomes them
    shards: tuple[ShardBytes, ...]  # one for each parameter
    gathered_bytes: int  # bytes that an all-gather returns
    reduced_bytes: int  # bytes that a reduce-scatter takes
    trainable_elements: int  # elements that a collective reduces, with padding


def unit_bytes(unit: Unit, plan: Plan) -> UnitBytes:
    """A unit's storages on rank 0: each parameter is split along its first dimension over `shard_degree` ranks, with padding."""
    n, offload = plan.shard_degree, plan.offload == "parameters"
    shards, stepped = [], []
    kept = reduced = trained = 0
    parameters = ignored = unsharded = NO_STORAGES
    for parameter in unit.parameters:
        stored, computed = stored_bytes(plan, parameter), compute_bytes(plan, parameter)
        if not is_sharded(parameter, plan):
            ignored += Storages.of(parameter.elements * stored)
            continue
        shape = shard_shape(parameter.shape, n)
        elements = prod(shape)
        parameters += Storages.of(elements * stored)
        unsharded += Storages.of(elements * n * computed)
        shards.append(ShardBytes(elements * stored, elements * computed))
        stepped.append(Stepped(parameter, shape, stored))
        if parameter.trainable:
            kept += elements * stored
            reduced += elements * gradient_bytes(plan, parameter)
            trained += elements
    optimizer, paged = kept_state(optimizer_of(plan), stepped)
    gathered = sum(shard.computed for shard in shards)
    cast = sum(shard.computed for shard in shards if shard.computed != shard.stored)
    return UnitBytes(
        parameters=parameters,
        ignored=ignored,
        optimizer=optimizer,
        paged=paged,
        gradients=Storages.of(kept),
        gather_input=Storages.of(cast) if not offload else NO_STORAGES,
        gather_output=Storages.of(gathered * n),
        unsharded=unsharded,
        reduce_input=Storages.of(reduced * n),
        reduce_output=Storages.of(reduced) if reduced != kept else NO_STORAGES,
        shards=tuple(shards),
        gathered_bytes=gathered * n,
        reduced_bytes=reduced * n,
        trainable_elements=trained * n,
    )


@lru_cache(maxsize=64)
def fsdp2_units(profile: Profile, plan: Plan) -> tuple[Wrapping, Mapping[UnitId, UnitBytes], States]:
    """(the units that are not single layers, the bytes of every unit, the states of rank 0)."""
    wrapping = wrapping_for(profile, plan)
    units = per_unit(profile, lambda unit: unit_bytes(unit, plan)) if wrapping.has_layers else {}
    units |= {unit_id: unit_bytes(part.unit, plan) for unit_id, part in wrapping.parts.items()}

    states = States(buffers=buffers(profile, plan.param_bytes))
    if plan.offload == "parameters":
        states = replace(states, parameters=_summed(profile, wrapping, units, lambda unit: unit.ignored))
    else:
        parameters = _summed(profile, wrapping, units, lambda unit: unit.parameters)
        optimizer = _summed(profile, wrapping, units, lambda unit: unit.optimizer)
        if wrapping.units or (len(wrapping.parts) == 1 and wrapping.has_layers):
            # the root's parts are added in the model's order, because a tied weight belongs to two of them while it is loaded
            parts = root_parts(profile)
            states_of = [unit_bytes(part, plan) for part in parts]
            weights_of = [unit_bytes(part, plan) for part in _as_filled(parts)]
            each = per_unit(profile, lambda unit: unit_bytes(unit, plan))
            parameters = summed(profile, each, lambda unit: unit.parameters, [part.parameters for part in weights_of])
            optimizer = summed(profile, each, lambda unit: unit.optimizer, [part.optimizer for part in states_of])
        states = replace(
            states,
            parameters=parameters + _summed(profile, wrapping, units, lambda unit: unit.ignored),
            gradients=_summed(profile, wrapping, units, lambda unit: unit.gradients),
            optimizer=optimizer + optimizer_of(plan).shared_state,
            paged=_summed(profile, wrapping, units, lambda unit: unit.paged),
        )
    return wrapping, units, states


def _as_filled(root: list[Unit]) -> list[Unit]:
    """The root's parts after `to_empty`, which allocates a tied weight once for each of its modules. Only the last copy stays."""
    tied = tuple(p for part in root for p in part.parameters if p.tied)
    parts = [replace(part, parameters=tuple(p for p in part.parameters if not p.tied)) for part in root]
    return [*parts[:-1], replace(parts[-1], parameters=parts[-1].parameters + tied)]


def _summed(
    profile: Profile, wrapping: Wrapping, units: Mapping[UnitId, UnitBytes], of: Callable[[UnitBytes], Storages]
) -> Storages:
    """The sum of `of` over all units: the root, the layers, and the parts of the root that are separate units."""
    if wrapping.units is not None:
        return total_of_policy(wrapping.units, units, of)
    parts = (of(units[unit_id]) for unit_id in wrapping.parts if unit_id != AT_ROOT)
    rest = of(units[AT_ROOT]) if wrapping.layers_in_root else summed(profile, units, of)
    return sum(parts, rest)


def fsdp2_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why FSDP2 cannot train the model; None if it can.

    bitsandbytes reads an attribute of 8-bit weights that their shards lack.
    """
    if has_8_bit_weights(profile):
        return UsageError(
            "FSDP2 fails with weights in 8 bits: 'Parameter' object has no attribute 'CB'",
            hint="--load-in-4bit, or --strategy ddp",
        )
    if takes_root_apart(plan) and _has_copy_of_tied_weight(profile):
        return UsageError(
            "accelerate 1.15 fails with FSDP2 if embedding and head share a weight and PEFT trains a copy of one: it puts them into two "
            "units",
            hint="--backend fsdp1, --strategy ddp or --framework torch; or leave the module out of modules_to_save",
        )
    return _dtypes_refusal(profile, plan)


def _has_copy_of_tied_weight(profile: Profile) -> bool:
    """Whether PEFT trains a copy of one of the root's tied weights (`modules_to_save`), or some of its rows (trainable tokens).

    accelerate then does not recognize the weights as tied, because it compares the copy in one module with the weight of the other.
    So FSDP2 finds the original weight in two units. Source: accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, `is_weights_tied`.
    """
    tied = (name for p in profile.root.parameters if p.tied for name in (p.name, *p.tied))
    return any(wrapper in name for name in tied for wrapper in (".original_module.", ".token_adapter."))


def _dtypes_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why FSDP2 cannot reduce the gradients of a unit together; None if it can.

    Source: torch.distributed.fsdp._fully_shard (torch 2.13), _fsdp_param_group.py, `_init_mp_dtypes`.
    """
    kinds = {id(unit): unit for unit in wrapping_for(profile, plan).in_order(profile)}
    for unit in kinds.values():
        first: dict[int, Parameter] = {}
        for parameter in unit.parameters:
            if parameter.trainable:
                first.setdefault(stored_bytes(plan, parameter), parameter)
        if len(first) > 1:
            narrow, wide = (first[n_bytes] for n_bytes in sorted(first)[:2])
            return UsageError(
                f"FSDP2 fails where one unit trains weights of two dtypes: {narrow.name} is in 16 bits, {wide.name} in fp32",
                hint="--dtype float32 with --precision bf16-mixed, --framework accelerate, which converts both to fp32, or --strategy ddp",
            )
    return None


def unit_warnings(profile: Profile, plan: Plan) -> list[str]:
    """Warnings about a loss that reads or gathers the head's weight by itself, about packed weights that are not sharded, and about the
    parameter whose padding costs every rank most.
    """
    warnings = list(_padding_warnings(profile, plan))
    if plan.loss_code in ("liger", "cce") and head_is_alone(profile, plan):
        warnings.append(
            f"--loss {plan.loss_code} fails in this job: it reads the head's weight without calling the head, which accelerate makes a "
            "unit by itself in a PEFT model, so FSDP2 does not gather it; use --loss full, or --framework trl, whose loss gathers it"
        )
    gathered = head_gathered_by_loss(profile, plan)
    if gathered is not None and profile.root.parameters[gathered].trainable:
        warnings.append(
            "the head's gradient is not averaged over the ranks: TRL's loss gathers the weight itself, so each rank trains its shard of "
            "the head on its own batch only; --strategy ddp averages it"
        )
    whole = profile.bytes_of(lambda p: 0 if is_sharded(p, plan) else stored_bytes(plan, p))
    if whole and plan.shard_degree > 1:
        warnings.append(
            f"FSDP does not shard packed weights of an integer dtype: every rank keeps all {format_bytes(whole)} of them; "
            "--bnb-4bit-quant-storage bfloat16 shards them"
        )
    return warnings


def _padding_warnings(profile: Profile, plan: Plan) -> tuple[str, ...]:
    """A warning about the parameter whose padding costs most. FSDP2 splits and pads dim 0 only."""
    excess, shards = 0, plan.shard_degree
    worst: Parameter | None = None
    for _, unit, count in recorded_units(profile):
        for parameter in unit.parameters:
            if not is_sharded(parameter, plan):
                continue
            more = (prod(shard_shape(parameter.shape, shards)) * shards - parameter.elements) * count
            if more > excess:
                excess, worst = more, parameter
    if worst is None or excess < profile.parameters // 100:
        return ()
    rows = worst.shape[0] if worst.shape else 1
    times = -(-rows // shards) * shards / rows
    return (
        f"FSDP2 splits {worst.name} {list(worst.shape)} along dim 0, which has {rows} rows for {shards} ranks: "
        f"with padding every rank keeps and gathers {times:.1f} times an even share",
    )


def managed_order(parameters: Sequence[Parameter]) -> list[int]:
    """Indices of a unit's `parameters`, sorted into the order in which FSDP2 manages them. `parameters` is in the order of
    `named_parameters`.

    A module's own parameters follow those of its children, and a tied parameter is at its first name. If all parameters of a child
    are tied to others, its position among its siblings is unknown; it is assumed to be the last, as the decoder of a masked language model
    is.
    Source: torch.distributed.fsdp._fully_shard._fsdp_init (torch 2.13), _get_managed_modules and _get_managed_states.
    >>> [managed_order([Parameter(name, (1,)) for name in names])[-1] for names in (["bias", "dense.weight"], ["a.weight", "b.weight"])]
    [0, 1]
    """
    children: dict[tuple[str, ...], dict[str, int]] = {}
    for parameter in parameters:
        path = parameter.name.split(".")[:-1]
        for depth, child in enumerate(path):
            siblings = children.setdefault(tuple(path[:depth]), {})
            siblings.setdefault(child, len(siblings))

    def visit(name: str) -> tuple[float, ...]:
        path = name.split(".")[:-1]
        ranks = (children.get(tuple(path[:depth]), {}) for depth in range(len(path)))
        return (*(of.get(child, len(of)) for of, child in zip(ranks, path, strict=True)), inf)

    return sorted(
        range(len(parameters)), key=lambda at: (min(map(visit, (parameters[at].name, *parameters[at].tied))), at)
    )
