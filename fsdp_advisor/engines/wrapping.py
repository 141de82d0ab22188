"""The FSDP2 units of the root (the parameters outside all layers), and the marks on a tape that a plan needs.

In plain PyTorch the root is one unit. accelerate divides it (utils/fsdp_utils.py, fsdp2_prepare_model, 1.14 and later):

- An input embedding that is not tied to the head is a separate unit.
- The final norm and the head, with the embedding if it is tied to the head, are one unit. It keeps its parameters from forward
  to backward.
- All other parameters stay in the root, which keeps them from forward to backward too.

On a tape all of this is the root's code; marks show where these units begin and end (`MarkedUnit`). In an image model the
embedding is the convolution over the patches, and the head's unit is the final norm only: the classifier stays in the root.

The units of other wrap policies than `layer` and `none` are those of `model.fsdp_units`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, GROUP, WHOLE, UnitId, Units, unit_at, units_of
from fsdp_advisor.model.profile import Parameter, ParameterRole, Profile, Unit
from fsdp_advisor.model.tape import MarkedUnit
from fsdp_advisor.model.tasks import task_of

EMBEDDING = unit_at(MarkedUnit.EMBEDDING, AT_ROOT)
HEAD = unit_at(MarkedUnit.HEAD, AT_ROOT)
OUTPUTS = unit_at(MarkedUnit.OUTPUTS, AT_ROOT)
"""The point at which DDP returns the model's outputs."""


@dataclass(frozen=True, eq=False)
class Part:
    """A unit within the root. `indices`: its parameters among the root's; those of layers may follow (`Wrapping.layers_in_root`).

    `keeps`: whether its parameters stay gathered from forward to backward. None: the same as for the layers.
    """

    unit: Unit
    indices: tuple[int, ...]
    keeps: bool | None = None


@dataclass(frozen=True, eq=False)
class Wrapping:
    """The units that are not single layers. `last`: the units that are reduced after backward, in order.

    `layers_in_root`: the layers are not units; their parameters belong to the root's units. `units`: the units of a
    wrap policy other than `layer` and `none`, else None; `parts` then has every unit, layers included.
    """

    parts: Mapping[UnitId, Part]
    last: tuple[UnitId, ...]
    layers_in_root: bool = False
    units: Units | None = None

    @property
    def has_layers(self) -> bool:
        """Whether every layer is a unit."""
        return not self.layers_in_root and self.units is None

    def in_order(self, profile: Profile) -> list[Unit]:
        """Every real unit in the order in which FSDP shards them, the root last. Units of one kind are the same object."""
        if self.units is not None:
            inner = [unit_id for unit_id in self.parts if unit_id != AT_ROOT]
            inner.sort(key=lambda unit_id: (unit_id.is_outside_layers, unit_id.stack, unit_id.part == WHOLE))
            found = [self.parts[unit_id].unit for unit_id in inner for _ in range(self.units.counts[unit_id])]
            return [*found, *(self.parts[unit_id].unit for unit_id in (AT_ROOT,) if unit_id in self.parts)]
        parts = [self.parts[unit_id].unit for unit_id in (EMBEDDING, HEAD, AT_ROOT) if unit_id in self.parts]
        return parts if self.layers_in_root else [*profile.layers(), *parts]


def takes_root_apart(plan: Plan) -> bool:
    """Whether the framework puts embedding and head into FSDP2 units of their own."""
    return plan.facts.splits_root_unit and plan.backend == "fsdp2"


def head_is_alone(profile: Profile, plan: Plan) -> bool:
    """Whether the head is a sharded unit by itself, which only its own forward gathers: accelerate finds no final norm in a PeftModel.

    Source: accelerate/utils/fsdp_utils.py (1.15), _find_final_norm.
    """
    roles = {p.role for p in profile.root.parameters}
    is_apart = takes_root_apart(plan) and plan.shard_degree > 1
    return is_apart and bool(profile.adapter_parameters) and "head" in roles and "final_norm" not in roles


def head_gathered_by_generation(profile: Profile, plan: Plan) -> bool:
    """Whether each micro-batch generates completions with a head that is a unit by itself. Generation calls the head, which gathers its
    weight until backward ends, so TRL's loss finds it gathered.
    """
    return head_is_alone(profile, plan) and plan.generates_each_micro_batch


def head_gathered_by_loss(profile: Profile, plan: Plan) -> int | None:
    """The index among the root's parameters of the weight that TRL's loss gathers itself: the head's, or that of its trained copy.

    None if FSDP2 gathers it. The loss never calls the head, so no module's forward gathers one that is a unit by itself, but generation.
    If a generation is for several micro-batches, the loss gathers it in all but the first, which need more memory.
    Source: trl 1.16, trainer/utils.py, `_fused_forward`; peft 0.21, utils/other.py, `ModulesToSaveWrapper`.
    """
    if plan.loss_code != "trl" or not head_is_alone(profile, plan) or plan.generates_each_micro_batch:
        return None
    found = in_module(profile, "head")
    copies = (i for i in found if ".modules_to_save." in profile.root.parameters[i].name)
    return next(copies, found[0])


def wrapping_for(profile: Profile, plan: Plan) -> Wrapping:
    """The units of a plan that are not single layers."""
    wrap = effective_wrap(profile, plan)
    if wrap == "layer" or (wrap == "none" and plan.backend != "fsdp1"):
        return wrapping_of(profile, divides_root=takes_root_apart(plan), layers_in_root=wrap == "none")
    if takes_root_apart(plan):
        raise UsageError(
            f"--wrap {plan.wrap} is not modelled with accelerate and FSDP2, which makes more units of the root",
            hint="use --wrap layer, or --framework torch",
        )
    return _by_policy(profile, wrap)


def effective_wrap(profile: Profile, plan: Plan) -> str:
    """The policy that divides the model into FSDP units: PEFT's or axolotl's where the framework sets it, else the
    plan's. A policy whose units are those of `layer` or `none` is named so. Backends without units: `layer`.

    With FSDP1 the Trainer uses PEFT's policy if the model has adapters. Source: transformers/distributed/fsdp.py (5.23),
    update_fsdp_plugin_peft. FSDP2 under accelerate does not use it: fsdp2_prepare_auto_wrap_policy. axolotl makes units of LoRA's matrices.
    """
    if plan.backend not in ("fsdp1", "fsdp2"):
        return "layer"
    if plan.backend == "fsdp1" and plan.facts.uses_trainer and profile.adapter_parameters:
        return "peft"
    if plan.backend == "fsdp2" and plan.facts.wraps_adapters and units_of(profile, "lora").modules:
        return "lora"
    if plan.wrap in ("layer", "none"):
        return plan.wrap
    units = units_of(profile, plan.wrap)
    if units.modules or units.groups:
        return plan.wrap
    if all(len(owners) and owners[0] == unit_id for unit_id, owners in units.owner_in_layer.items()):
        return "layer"
    return plan.wrap if units.layers else "none"


def tape_wrap(profile: Profile, plan: Plan) -> str:
    """The policy with whose units the plan's tape is recorded; empty for a tape with marks only of layers and root.

    FSDP2's hooks are the same for any layers or groups of them. FSDP1's flat parameters are part of the autograd graph.
    """
    wrap = effective_wrap(profile, plan)
    if wrap == "layer" or (plan.backend == "fsdp2" and not units_of(profile, wrap).modules):
        return ""
    return wrap


def _by_policy(profile: Profile, wrap: str) -> Wrapping:
    units = units_of(profile, wrap)
    parts = {unit_id: Part(Unit(profile.root.kind, members), ()) for unit_id, members in units.members.items()}
    return Wrapping(parts, (AT_ROOT,), units=units)


def wrapping_of(profile: Profile, *, divides_root: bool, layers_in_root: bool = False) -> Wrapping:
    """The root's units: accelerate's if `divides_root`, else one. `layers_in_root`: the layers are not units; their parameters belong to
    the root's unit.
    """
    parameters = profile.root.parameters
    embedding = in_module(profile, "embedding") if divides_root and task_of(profile.task).has_root_units else ()
    if not embedding:
        root = profile.root if not layers_in_root else Unit(profile.root.kind, (*parameters, *_of_layers(profile)))
        return Wrapping({AT_ROOT: Part(root, tuple(range(len(parameters))))}, (AT_ROOT,), layers_in_root)
    tied = any(parameters[i].tied for i in embedding)
    # accelerate 1.15, utils/fsdp_utils.py, fsdp2_prepare_model: `tail_modules`
    of_tail = (*with_role(profile, "final_norm"), *(embedding if tied else ()), *in_module(profile, "head"))
    tail = tuple(dict.fromkeys(of_tail))
    alone = () if tied else embedding
    rest = tuple(i for i in range(len(parameters)) if i not in tail and i not in alone)

    def part(indices: tuple[int, ...], keeps: bool | None, more: tuple[Parameter, ...] = ()) -> Part:
        return Part(Unit(profile.root.kind, (*(parameters[i] for i in indices), *more)), indices, keeps)

    parts = {AT_ROOT: part(rest, True, _of_layers(profile) if layers_in_root else ()), HEAD: part(tail, True)}
    if alone:
        parts[EMBEDDING] = part(alone, None)
    return Wrapping(parts, (AT_ROOT, EMBEDDING if alone else HEAD), layers_in_root)


def marked_units(profile: Profile, plan: Plan) -> frozenset[int]:
    """The units (`MarkedUnit`) within the root at whose marks on the tape the plan's engine runs hooks."""
    if plan.backend == "ddp" and plan.uses_accelerate:
        return frozenset({OUTPUTS.mark})
    units = wrapping_for(profile, plan).parts
    return frozenset(unit.mark for unit in units if unit != AT_ROOT and unit.part != GROUP)


def _of_layers(profile: Profile) -> tuple[Parameter, ...]:
    return tuple(parameter for unit in profile.layers() for parameter in unit.parameters)


def in_module(profile: Profile, role: ParameterRole) -> tuple[int, ...]:
    """Indices of the root's parameters in the module of this role: its own, and those of an adapter or a trained copy in its place.

    accelerate takes the module that PEFT puts there. Source: peft 0.21, utils/other.py, `AuxiliaryTrainingWrapper`
    (`original_module`), and tuners/tuners_utils.py, `BaseTunerLayer` (`base_layer`).
    """
    own = with_role(profile, role)
    parameters = profile.root.parameters
    modules = {parameters[i].name.rpartition(".")[0] for i in own}
    around = tuple(m.rpartition(".")[0] + "." for m in modules if m.endswith((".original_module", ".base_layer")))
    added = (i for i, p in enumerate(parameters) if p.role == "adapter" and p.name.startswith(around))
    return tuple(sorted((*own, *added))) if around else own


def with_role(profile: Profile, role: ParameterRole) -> tuple[int, ...]:
    """Indices of the root's parameters that have this role."""
    return tuple(i for i, p in enumerate(profile.root.parameters) if p.role == role)
