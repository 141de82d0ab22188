"""The dtypes of single parameters under a plan. A parameter has the plan's dtype, or one of its own (adapters, packed weights)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import half_dtype
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1, "int8": 1,
}  # fmt: skip


FP32_BYTES, HALF_BYTES = 4, 2
_PACKED_EXPERTS = ".parametrizations."
"""A part of the names of packed experts: bitsandbytes makes them parameters of the module that unpacks them."""


def is_floating(parameter: Parameter) -> bool:
    """Whether the parameter has a floating dtype: its own, or the model's (None)."""
    return parameter.dtype is None or "float" in parameter.dtype


def is_sharded(parameter: Parameter, plan: Plan) -> bool:
    """Whether FSDP2 shards the parameter. Packed weights of an integer dtype stay whole on every rank, except with axolotl.

    Source: accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, `ignored_params`; `fully_shard` itself fails on them.
    """
    return parameter.role != "quantized" or is_floating(parameter) or plan.facts.shards_integers


def has_8_bit_weights(profile: Profile) -> bool:
    """Whether bitsandbytes stores weights of the model in 8 bits."""
    return any(p.dtype == "int8" for p, _ in profile.counted_parameters())


def packing_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why FSDP's mixed precision destroys the packed weights; None if it does not. It converts all floating-point parameters when it
    gathers them, and the bytes of packed weights are no numbers of their storage dtype.

    Source: torch.distributed.fsdp (torch 2.13), _flat_param.py, `_use_low_precision_shard`; _fully_shard/_fsdp_param.py,
    `all_gather_inputs`.
    """
    if not plan.mixed:
        return None
    computed = half_dtype(plan.precision)
    for p, _ in profile.counted_parameters():
        if p.role == "quantized" and is_floating(p) and p.dtype not in (None, computed):
            return UsageError(
                f"FSDP's mixed precision converts packed weights from {p.dtype} to {computed}, which destroys their values",
                hint=f"--bnb-4bit-quant-storage {computed}",
            )
    return None


def packed_experts_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the plan's backend is not modelled with packed experts; None if it is, or the model has none."""
    packed = (p for p, _ in profile.counted_parameters() if p.role == "quantized")
    if plan.backend == "ddp" or not any(_PACKED_EXPERTS in p.name for p in packed):
        return None
    return UsageError(
        f"{plan.backend} with packed experts (--quantize-moe-experts) is not modelled", hint="--strategy ddp"
    )


@lru_cache(maxsize=64)
def with_cast_biases(profile: Profile) -> Profile:
    """The profile after the first forward of a model with layers in 4 bits and other weights in fp32. Each of these layers has cast its
    bias permanently to the dtype in which it computes. Under FSDP a layer cannot replace its parameter: the bias keeps its dtype.

    Source: bitsandbytes 0.50.2, nn/modules.py, `Linear4bit.forward`; peft 0.21, `prepare_model_for_kbit_training`.
    """

    def cast(unit: Unit) -> Unit:
        packed = {p.name.removesuffix(".weight") for p in unit.parameters if p.role == "quantized"}
        if not packed:
            return unit
        parameters = (
            replace(p, dtype="bfloat16")
            if p.dtype is None and p.name.endswith(".bias") and p.name.removesuffix(".bias") in packed
            else p
            for p in unit.parameters
        )
        return replace(unit, parameters=tuple(parameters))

    return profile.with_units(cast)


def stored_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes per element in which DDP and FSDP keep the parameter, its gradient and its optimizer state.

    Under mixed precision accelerate keeps trained parameters in fp32 for FSDP; with FSDP2 not those of a model with 4-bit weights, whose
    parameters have dtypes of their own. Source: accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, `model_has_params4bit`;
    accelerate/accelerator.py, prepare_model.
    """
    if upcasts_trained(plan) and parameter.requires_grad and (plan.backend == "fsdp1" or parameter.dtype is None):
        return FP32_BYTES
    return loaded_bytes(plan, parameter)


def loaded_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes per element of the parameter as it is loaded, before an engine changes its dtype."""
    return plan.param_bytes if parameter.dtype is None else ITEM_BYTES[parameter.dtype]


def upcasts_trained(plan: Plan) -> bool:
    """Whether accelerate converts trained parameters to fp32 when it prepares a model for FSDP. Under FSDP1 it converts whole units."""
    by_accelerate = plan.backend == "fsdp1" or (plan.backend == "fsdp2" and not plan.facts.trains_half)
    return plan.mixed and plan.uses_accelerate and by_accelerate


def compute_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes per element in which FSDP gathers the parameter: mixed precision casts floating-point parameters."""
    if plan.mixed and is_floating(parameter) and parameter.role != "quantized":
        return plan.compute_bytes
    return plan.compute_bytes if parameter.dtype is None else ITEM_BYTES[parameter.dtype]


def cast_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes per element under DeepSpeed, which casts every floating-point weight that is not packed.

    Source: deepspeed/runtime/engine.py, _configure_distributed_model.
    """
    if is_floating(parameter) and parameter.role != "quantized":
        return plan.compute_bytes
    return ITEM_BYTES[str(parameter.dtype)]


def gradient_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes per element in which FSDP reduces the parameter's gradient."""
    return plan.reduce_bytes or compute_bytes(plan, parameter)
