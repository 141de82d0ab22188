"""The flat parameters of PyTorch FSDP1 and their bytes on rank 0.

With `use_orig_params` parameters are aligned within the flat parameter, its padding has a gradient, and the optimizer steps the pieces
of the original parameters in a shard. Without it they are adjacent, a gradient is padded when it is reduced, and the optimizer steps
the shard as one tensor.
Source: torch.distributed.fsdp._flat_param (torch 2.13), `_init_flat_param_and_metadata`, `_get_shard`; _runtime_utils,
`_get_reduce_scatter_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.engines.optimizer_state import kept_state
from fsdp_advisor.engines.units import buffers, per_unit, summed, total_of_policy
from fsdp_advisor.engines.wrapping import Wrapping, effective_wrap, in_module, wrapping_for
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, Units
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.policies.clipping import CLIP_NORM_BYTES
from fsdp_advisor.policies.dtypes import FP32_BYTES, has_8_bit_weights, is_floating, loaded_bytes, upcasts_trained
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Stepped
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages

ALIGNMENT_BYTES = 16


def flat_elements(numels: list[int], aligned: int, world_size: int) -> int:
    """Elements of a flat parameter: each parameter begins at a multiple of `aligned`, the total is padded to a multiple of the ranks.

    >>> flat_elements([3, 8], 4, 5)
    15
    """
    total = 0
    for numel in numels:
        total += -total % aligned + numel
    return total + -total % world_size


def first_shard(numels: list[int], aligned: int, shard_elements: int) -> list[int]:
    """Elements of each parameter that lie in rank 0's shard.

    >>> first_shard([3, 8], 4, 6)
    [3, 2]
    """
    at, pieces = 0, []
    for numel in numels:
        at += -at % aligned
        pieces.append(max(0, min(numel, shard_elements - at)))
        at += numel
    return pieces


def unit_elements(unit: Unit, plan: Plan) -> int:
    """Elements of a unit's gathered flat parameter, padding included."""
    return flat_elements([p.elements for p in unit.parameters], _alignment(unit, plan), plan.shard_degree)


def gathered_element_bytes(unit: Unit, plan: Plan) -> int:
    """Bytes per element of a unit's gathered flat parameter: mixed precision casts it, else it has the dtype of the shard."""
    return plan.compute_bytes if plan.mixed else flat_bytes(unit, plan)


def reduced_element_bytes(unit: Unit, plan: Plan) -> int:
    """Bytes per element of a unit's gradient when it is reduced: as mixed precision says, else those of the gathered flat parameter."""
    return plan.reduce_bytes or flat_bytes(unit, plan)


def _alignment(unit: Unit, plan: Plan) -> int:
    """FSDP1 aligns each parameter of a unit to a multiple of this number of elements."""
    return ALIGNMENT_BYTES // gathered_element_bytes(unit, plan) if plan.use_orig_params else 1


def stepped_in(unit: Unit, plan: Plan, shard_elements: int) -> list[tuple[Parameter, int]]:
    """The parameters that the optimizer steps, and the elements of each in rank 0's shard."""
    if plan.use_orig_params:
        pieces = first_shard([p.elements for p in unit.parameters], _alignment(unit, plan), shard_elements)
        return list(zip(unit.parameters, pieces, strict=True))
    return [(Parameter("_flat_param", (unit.elements,), unit.trainable_elements > 0), shard_elements)]


class UnitBytes(NamedTuple):
    """One unit's storages on rank 0."""

    shard: Storages
    optimizer: Storages
    paged: Storages  # optimizer state in managed memory
    optimizer_temporaries: Storages  # of all parameters, or of the largest if they are updated one by one
    gathered_shard: Storages  # the all-gather's input, if it is a copy: in the compute dtype, or uploaded from the host
    uploaded_shard: Storages  # the shard on the GPU before its cast to the compute dtype
    unsharded: Storages
    # the gradient in the reduce dtype, and padded; empty if it has that dtype and needs no padding
    reduce_input: Storages
    reduce_output: Storages  # empty if the output has the dtype of the gradients and becomes them
    norms: Storages  # one scalar for each stepped parameter with elements in the shard
    gradients: Storages
    has_trained_piece: bool  # whether rank 0's shard has elements of a trained parameter
    elements: int  # of the unit, without padding
    trainable_elements: int
    stored_element_bytes: int  # of the shard
    gathered_element_bytes: int  # of the gathered flat parameter
    reduced_element_bytes: int  # of the gradient when it is reduced
    initial: Storages  # allocated before the first forward and freed immediately (`init_flat_param_attributes`)


def _unit_bytes(unit: Unit, plan: Plan) -> UnitBytes:
    alone = plan.shard_degree == 1
    trains = unit.trainable_elements > 0
    stepping = optimizer_of(plan)
    stored, gathered, reduced = (
        flat_bytes(unit, plan),
        gathered_element_bytes(unit, plan),
        reduced_element_bytes(unit, plan),
    )
    elements = unit_elements(unit, plan)
    local = elements // plan.shard_degree
    stepped = stepped_in(unit, plan, local)
    optimizer, paged = kept_state(stepping, (Stepped(p, (piece,), stored) for p, piece in stepped if piece))
    temporaries = norms = NO_STORAGES
    for parameter, piece in stepped:
        if piece and parameter.trainable:
            norms += Storages.of(CLIP_NORM_BYTES)
            update = stepping.step_temporaries(parameter, (piece,), stored)
            if not stepping.steps_one_by_one:
                temporaries += update
            elif update.exact > temporaries.exact:
                temporaries = update
    reduces_low = reduced != stored and not alone
    initial = Storages.of(local * gathered) if plan.mixed else NO_STORAGES
    if not alone:
        initial += Storages.of(elements * gathered)
        initial += Storages.of(elements * stored) if plan.mixed else NO_STORAGES
    offload = plan.offload == "parameters"
    return UnitBytes(
        shard=Storages.of(local * stored),
        optimizer=optimizer,
        paged=paged,
        optimizer_temporaries=temporaries,
        gathered_shard=Storages.of(local * gathered) if (not alone if plan.mixed else offload) else NO_STORAGES,
        uploaded_shard=Storages.of(local * stored) if plan.mixed and offload else NO_STORAGES,
        unsharded=Storages.of(elements * gathered) if plan.mixed or not alone else NO_STORAGES,
        reduce_input=_reduce_input(unit, plan),
        reduce_output=Storages.of(local * reduced) if reduces_low else NO_STORAGES,
        norms=norms,
        gradients=Storages.of(local * stored) if trains else NO_STORAGES,
        has_trained_piece=any(parameter.trainable and piece for parameter, piece in stepped),
        elements=unit.elements,
        stored_element_bytes=stored,
        gathered_element_bytes=gathered,
        reduced_element_bytes=reduced,
        trainable_elements=unit.trainable_elements,
        initial=initial,
    )


def _reduce_input(unit: Unit, plan: Plan) -> Storages:
    """What reduction makes of a unit's gradient: a cast to the reduce dtype, and a copy that is padded to a multiple of the ranks."""
    if plan.shard_degree == 1:
        return NO_STORAGES
    reduced = reduced_element_bytes(unit, plan)
    padded = unit_elements(unit, plan)
    elements = padded if plan.use_orig_params else unit.elements  # of the flat parameter's gradient
    result = NO_STORAGES
    if reduced != gathered_element_bytes(unit, plan):
        result += Storages.of(elements * reduced)
    if elements < padded:
        result += Storages.of(padded * reduced)
    return result


def flat_bytes(unit: Unit, plan: Plan) -> int:
    """Bytes per element of a unit's flat parameter between steps. accelerate converts a unit to fp32 if any of its parameters is trained.

    Source: accelerate/accelerator.py, prepare_model: `module._flat_param` of a module that requires a gradient.
    """
    if upcasts_trained(plan) and any(p.requires_grad for p in unit.parameters):
        return FP32_BYTES
    return max((loaded_bytes(plan, p) for p in unit.parameters), default=plan.param_bytes)


def fsdp1_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why FSDP1 cannot train the model's units; None if it can. Source of what it can flatten: `_validate_tensors_to_flatten`."""
    if effective_wrap(profile, plan) == "peft" and (refused := _dora_refusal(profile, plan)) is not None:
        return refused
    wrapping = wrapping_for(profile, plan)
    if plan.loss_code != "full" and _has_head_unit(profile, wrapping):
        return UsageError(
            "the head is an FSDP1 unit by itself, and its weight is sharded when the loss reads it"
            + ("; Liger's loss, which gathers it, is not modelled there" if plan.loss_code == "liger" else ""),
            hint="--loss full, --strategy ddp, or --backend fsdp2 with --framework trl or torch",
        )
    for unit in wrapping.in_order(profile):
        packed = [p for p in unit.parameters if p.role == "quantized"]
        if any(not is_floating(p) for p in packed):
            return UsageError(
                "FSDP1 cannot flatten packed weights of an integer dtype",
                hint="--strategy ddp, or --load-in-4bit with --backend fsdp2"
                if has_8_bit_weights(profile)
                else "--backend fsdp2, --strategy ddp, or --framework trl with --bnb-4bit-quant-storage bfloat16",
            )
        if not plan.use_orig_params and (refused := _mixed_refusal(unit)) is not None:
            return refused
        first: dict[int, Parameter] = {}
        for parameter in unit.parameters:
            first.setdefault(loaded_bytes(plan, parameter), parameter)
        if len(first) <= 1:
            continue
        narrow, wide = (first[n_bytes] for n_bytes in sorted(first)[:2])
        return UsageError(
            f"FSDP1 flattens the parameters of a unit, which must have one dtype: {narrow.name} is in 16 bits, {wide.name} in fp32",
            hint="--backend fsdp2, or --framework trl, which keeps one dtype next to packed weights"
            if packed
            else "--framework trainer, which makes units of adapters, --backend fsdp2, or --dtype float32 with --precision bf16-mixed",
        )
    return None


def _dora_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why DoRA cannot be trained with units of adapters; None if it can, or is not used.

    The first forward of an adapter computes DoRA's norm, which has no gradient. In mixed precision FSDP1 registers the reduction of a
    gradient only there, so the optimizer finds a whole gradient in 16 bits, and fails.
    Source: peft 0.21, tuners/lora/dora.py, `get_lora_weight`; torch 2.13, fsdp/_runtime_utils.py, `_register_post_backward_hook`.
    """
    parameters = (p for p, _ in profile.counted_parameters())
    if not any("lora_magnitude_vector" in p.name for p in parameters):
        return None
    if plan.use_orig_params:
        return UsageError(
            "DoRA reads the shape of an adapter's weight outside its unit, where FSDP1 with use_orig_params has only a flat shard",
            hint="--backend fsdp2, or LoRA",
        )
    if plan.mixed:
        return UsageError(
            "FSDP1's mixed precision does not reduce the gradients of DoRA's adapters, and the optimizer fails",
            hint="--backend fsdp2, --precision bf16, or LoRA",
        )
    return None


def _mixed_refusal(unit: Unit) -> UsageError | None:
    """Why one flat parameter cannot have all of the unit's parameters: some are trained, others are not. None if it can."""
    trained = [p for p in unit.parameters if p.requires_grad]
    frozen = [p for p in unit.parameters if not p.requires_grad]
    if not trained or not frozen:
        return None
    return UsageError(
        f"without use_orig_params FSDP1 trains all parameters of a unit or none: {trained[0].name} is trained, {frozen[0].name} is not",
        hint="use_orig_params true, --backend fsdp2, or for adapters --framework trainer, which makes units of them",
    )


def _has_head_unit(profile: Profile, wrapping: Wrapping) -> bool:
    """Whether the weight of the head, or the copy of it that PEFT trains, is in a unit within the root."""
    heads = {profile.root.parameters[i].name for i in in_module(profile, "head")}
    inner = (part.unit for unit_id, part in wrapping.parts.items() if unit_id != AT_ROOT)
    return any(p.name in heads for unit in inner for p in unit.parameters)


@dataclass(frozen=True, eq=False)
class Fsdp1Units:
    """The units of a model. `policy`: those of a wrap policy other than `layer`, else None. `by_id`: the bytes of every unit."""

    profile: Profile
    policy: Units | None
    by_id: Mapping[UnitId, UnitBytes]

    def total(self, of: Callable[[UnitBytes], Storages]) -> Storages:
        """The sum of `of` over all real units, the root first unless a policy makes the units."""
        if self.policy is not None:
            return total_of_policy(self.policy, self.by_id, of)
        return summed(self.profile, self.by_id, of)

    def total_of_shards(self) -> Storages:
        """The sum of all shards. The root's is allocated after the layers'."""
        if self.policy is not None:
            return self.total(lambda unit: unit.shard)
        root = [*[NO_STORAGES] * len(self.profile.stacks), self.by_id[AT_ROOT].shard]
        return summed(self.profile, self.by_id, lambda unit: unit.shard, root)


@lru_cache(maxsize=64)
def fsdp1_units(profile: Profile, plan: Plan) -> tuple[Fsdp1Units, States]:
    """The units, and the states of rank 0."""
    wrapping = wrapping_for(profile, plan)
    if wrapping.units is None:
        by_id = per_unit(profile, lambda unit: _unit_bytes(unit, plan))
    else:
        by_id = {unit_id: _unit_bytes(part.unit, plan) for unit_id, part in wrapping.parts.items()}
    units = Fsdp1Units(profile, wrapping.units, by_id)
    # MixedPrecision's buffer_dtype: FSDP1 casts floating-point buffers once, before the first forward (`_lazy_init`)
    states = States(buffers=buffers(profile, plan.param_bytes, plan.compute_bytes if plan.mixed else None))
    if plan.offload != "parameters":
        states = replace(
            states,
            parameters=units.total_of_shards(),
            gradients=units.total(lambda unit: unit.gradients),
            optimizer=units.total(lambda unit: unit.optimizer) + optimizer_of(plan).shared_state,
            paged=units.total(lambda unit: unit.paged),
        )
    return units, states
