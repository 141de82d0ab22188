"""The FSDP units of a plan in words, and warnings about what is not sharded and about wrapping that is too fine or too coarse."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.engines.wrapping import effective_wrap, wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fp32_modules import weights_in_fp32
from fsdp_advisor.model.fsdp_units import AT_ROOT, FIRST_OF_ROOT, GROUP
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import upcasts_trained
from fsdp_advisor.units import format_bytes, format_count

EFFICIENT_GATHER_ELEMENTS = 33_000_000
"""With units below this size, collectives of the same total number of elements take much longer. Source: Zhao et al., PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel (arXiv:2304.11277), section 3.2.1 and figure 2.
"""
COARSE_SHARE = 0.25
"""The share of a model's parameters in one unit above which wrapping is called coarse."""


def units_text(profile: Profile, plan: Plan) -> str | None:
    """The units of a plan under FSDP, the largest first, with their parameters. None for other backends.

    Example: "32 x LlamaDecoderLayer (202M parameters), root (262M)".
    """
    if plan.backend not in ("fsdp1", "fsdp2"):
        return None
    sizes = Counter(_named_units(profile, plan.without_step))
    units = sorted(sizes.items(), key=lambda item: (-item[0][1] * item[1], item[0]))
    return ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{name} ({format_count(size)})" for (name, size), count in units
    )


@lru_cache(maxsize=256)
def _named_units(profile: Profile, plan: Plan) -> tuple[tuple[str, int], ...]:
    """(name, parameter elements) of every real unit."""
    wrapping = wrapping_for(profile, plan)
    if wrapping.units is None:
        root = wrapping.in_order(profile)[
            0 if wrapping.layers_in_root else sum(stack.depth for stack in profile.stacks) :
        ]
        layers = () if wrapping.layers_in_root else profile.layers()
        return (
            *((unit.kind, unit.elements) for unit in layers),
            *(("root", unit.elements) for unit in root if unit.elements),
        )
    units = wrapping.units
    found: list[tuple[str, int]] = []
    for unit_id, part in wrapping.parts.items():
        if unit_id == AT_ROOT:
            name = "root"
        elif unit_id.is_outside_layers:
            name = units.of_root[unit_id.number - FIRST_OF_ROOT]
        elif unit_id.part == GROUP:
            name = f"group of {profile.stacks[unit_id.stack].units[0].kind}"
        else:
            layer = profile.stacks[unit_id.stack].units[unit_id.number].kind
            name = layer if unit_id.is_layer else f"{layer}.{units.within[unit_id.layer][unit_id.part]}"
        found += [(name, part.unit.elements)] * units.counts[unit_id]
    return tuple(found)


def packed_warnings(profile: Profile, plan: Plan) -> list[str]:
    """A warning about a GPTQ or AWQ checkpoint: its packed weights are buffers, which FSDP and DeepSpeed do not shard."""
    whole = sum(b.n_bytes * n for unit, n in profile.counted_units() for b in unit.buffers if b.matrix)
    if not whole or plan.backend == "ddp" or plan.shard_degree == 1:
        return []
    return [
        f"the packed weights of the checkpoint are buffers, which are not sharded: every rank keeps all {format_bytes(whole)}. To "
        "shard them, quantize the original model: --load-in-4bit --bnb-4bit-quant-storage bfloat16"
    ]


def dtype_warnings(profile: Profile, plan: Plan) -> list[str]:
    """A warning about weights that transformers loads in fp32 although the others are in 16 bits: FSDP needs one dtype
    in a unit.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `_init_mp_dtypes`; distributed/fsdp/_flat_param.py,
    `_validate_tensors_to_flatten`.
    """
    stays_half = plan.backend == "fsdp1" or (plan.backend == "fsdp2" and not upcasts_trained(plan))
    if not stays_half or plan.param_bytes != 2 or (found := weights_in_fp32(profile)) is None:
        return []
    weight, since = found
    return [
        f"transformers{since} loads {weight} in fp32 even beside weights in 16 bits, and FSDP stops, because it needs one dtype in a unit; "
        "the figures are for one dtype. Use --precision bf16-mixed with weights in fp32, or cast that weight after loading"
    ]


def saving_warnings(profile: Profile, plan: Plan) -> list[str]:
    """A warning about adapters in units of FSDP1, which PEFT does not find when it saves.

    Source: peft 0.21, tuners/tuners_utils.py, `_get_tuner_state_dict_key_prefixes`: of the names of modules it removes only a leading
    `_fsdp_wrapped_module.`, and FSDP removes them all from the names in its state dict.
    """
    in_layers = any(p.role == "adapter" for stack in profile.stacks for unit in stack.units for p in unit.parameters)
    if plan.backend != "fsdp1" or not in_layers or effective_wrap(profile, plan) == "none":
        return []
    return [
        "PEFT 0.21 saves an empty file of adapters under FSDP1: it looks for them by names of modules, which contain _fsdp_wrapped_module "
        "for each unit. Use --backend fsdp2, or save the adapters' entries of FSDP's state dict yourself"
    ]


def wrap_warnings(profile: Profile, plan: Plan) -> list[str]:
    """Warnings about units that are too large, whose memory is not sharded while they run, or too small to gather efficiently."""
    if plan.backend not in ("fsdp1", "fsdp2") or plan.shard_degree == 1 or effective_wrap(profile, plan) == "layer":
        return []
    units = _named_units(profile, plan.without_step)
    usual = _named_units(profile, replace(plan.without_step, wrap="layer"))
    name, largest = max(units, key=lambda unit: unit[1])
    warnings = []
    if largest > COARSE_SHARE * profile.parameters and largest > 2 * max(n for _, n in usual):
        warnings.append(
            f"--wrap {plan.wrap} makes large units: one unit ({name}) has {format_count(largest)} of {format_count(profile.parameters)} "
            f"parameters, which every GPU gathers at once ({format_bytes(largest * plan.compute_bytes)}), and whose gradients it "
            "holds whole; use --wrap layer"
        )
    mean = profile.parameters // len(units)
    if len(units) > 2 * len(usual) and mean < EFFICIENT_GATHER_ELEMENTS:
        warnings.append(
            f"--wrap {plan.wrap} makes small units: {len(units)} units have {format_count(mean)} parameters on average, and collectives "
            f"below {format_count(EFFICIENT_GATHER_ELEMENTS)} are inefficient; use --wrap layer"
        )
    return warnings
