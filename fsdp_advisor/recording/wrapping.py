"""Recording under a wrap policy: its units, checked against PyTorch's policy, and the gradients of flat parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import wrap

from fsdp_advisor.errors import NotRecordable, assert_never
from fsdp_advisor.job.wrap_policy import wrap_policy
from fsdp_advisor.model.fsdp_units import AT_ROOT, FIRST_OF_ROOT, UnitId, Units, units_of
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Category, Op, Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.engines import aligned_splits, alignment
from fsdp_advisor.recording.source import Source


def modules_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The modules that `size_based_auto_wrap_policy` wraps with `min_num_params=least`, as FSDP1 calls it."""
    found: list[nn.Module] = []

    def select(module: nn.Module) -> nn.Module:
        found.append(module)
        return module

    policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=least)
    wrap._recursive_wrap(model, policy, select, set(), set(), only_wrap_children=True)
    return found


def modules_by_peft(source: Source, model: nn.Module) -> list[nn.Module]:
    """The modules that PEFT's `fsdp_auto_wrap_policy` selects: layers, and modules without children whose weight is trained.

    Source: peft/utils/other.py (0.21).
    """
    layers = [layer for stack in source.stacks(model) for layer in stack.layers]
    weights = {m: m._parameters.get("weight") for m in model.modules() if not [*m.children()]}
    return [*layers, *(m for m, weight in weights.items() if weight is not None and weight.requires_grad)]


def modules_of_lora(source: Source, model: nn.Module) -> list[nn.Module]:
    """The modules that axolotl makes units: layers, LoRA's matrices and magnitudes, and embeddings with LoRA.

    Source: axolotl 0.19.0, monkeypatch/accelerate/fsdp2.py, `_process_lora_module_for_fsdp`.
    """
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    found = [layer for stack in source.stacks(model) for layer in stack.layers]
    for module in model.modules():
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
            found += [*module.lora_A.values(), *module.lora_B.values(), *module.lora_magnitude_vector.values()]
            found += [module] if module.lora_embedding_A else []
    return found


def units_to_record(source: Source, profile: Profile, key: TapeKey) -> Units | None:
    """The units of the key's wrap policy; None for a unit per layer.

    Raises NotRecordable if PyTorch's own policy selects other modules. It also does if units are within checkpointed layers and it is not
    modelled how a recomputation gathers them: adapters if not all layers are checkpointed as a whole, other units under FSDP1 and in
    reentrant checkpoints.
    """
    policy = wrap_policy(key.wrap)
    if policy is None:
        return None
    units = units_of(profile, key.wrap)
    of_adapters = policy.kind in ("peft", "lora")
    by_fsdp2 = key.engine == "fsdp2" and key.checkpointing != "reentrant"
    modelled = key.checkpointing in ("full", "reentrant") if of_adapters else by_fsdp2
    if key.checkpointing != "none" and units.modules and not modelled:
        by = "the Trainer" if policy.kind == "peft" else "axolotl"
        units_within = f"{by} makes FSDP units of the adapters" if of_adapters else f"--wrap {key.wrap} makes units"
        raise NotRecordable(
            f"{units_within} within checkpointed layers, whose recomputation is not modelled",
            hint="use --activation-checkpointing full, reentrant or none"
            if of_adapters
            else "use --wrap layer, --activation-checkpointing none, or --backend fsdp2 with other than reentrant checkpoints",
        )
    match policy.kind:
        case "layer" | "none" | "class" | "every":
            return units
        case "size":
            select = partial(modules_by_size, least=policy.number)
        case "lora":
            select = partial(modules_of_lora, source)
        case "peft":
            select = partial(modules_by_peft, source)
        case _:
            assert_never(policy.kind)
    model = source.build(torch.float32)
    names = {module: name for name, module in model.named_modules()}
    if {names[module] for module in select(model)} != _names(source, profile, model, units):
        raise NotRecordable(
            f"{source.name}: --wrap {key.wrap} selects other modules than the names of its parameters show",
            hint="use --wrap layer",
        )
    return units


def _names(source: Source, profile: Profile, model: nn.Module, units: Units) -> set[str]:
    """The names of all real units other than the root."""
    names = {module: name for name, module in model.named_modules()}
    found = set(units.of_root)
    for s, stack in enumerate(source.stacks(model)):
        for layer, module in zip(profile.stacks[s].recorded_order, stack.layers, strict=True):
            found |= {names[module]} if UnitId(s, layer) in units.layers else set()
            found |= {f"{names[module]}.{name}" for name in units.within[UnitId(s, layer)]}
    return found


def with_whole_gradients(tape: Tape, profile: Profile, key: TapeKey) -> Tape:
    """The tape with the sizes of flat parameters' gradients corrected from those of the recorded layers to those of the whole model."""
    if not key.wrap or not key.uses_flat_parameter:
        return tape
    element_bytes = 4 if key.precision == "fp32" else 2
    aligned = 1 if key.flat_parameters else alignment(element_bytes)
    n_bytes = {}
    for unit, members in units_of(profile, key.wrap).members.items():
        if unit.is_outside_layers:
            index = 0 if unit == AT_ROOT else unit.number - FIRST_OF_ROOT + 1
            elements = sum(aligned_splits([p.elements for p in members], aligned)[0])
            n_bytes[Category.GRADIENT + 2 * index + 1] = elements * element_bytes
    return _with_sizes(tape, n_bytes)


def _with_sizes(tape: Tape, n_bytes: Mapping[int, int]) -> Tape:
    """A copy of the tape in which every storage of a category in `n_bytes` has that many bytes."""
    index = {category: len(tape.sizes) + i for i, category in enumerate(n_bytes)}
    segments = tuple(
        replace(s, events=tuple((op, index.get(b, a), b) if op == Op.ALLOC else (op, a, b) for op, a, b in s.events))
        for s in tape.segments
    )
    return Tape((*tape.sizes, *((size, 0, 0, 0, 0, 0) for size in n_bytes.values())), segments)
