"""Merging adapters into their base: the memory of PEFT's `merge_and_unload`, which visits one layer after the other.

Source: peft 0.21, tuners/lora/layer.py, `Linear.merge` and `get_delta_weight`; tuners/lora/bnb.py, `Linear4bit.merge` and
`Linear8bitLt.merge`; tuners/lora/variants.py, `DoraLinearVariant`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.adaptation import CONFIG_KEY
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.quantization import Quantization, QuantizationMethod, is_packed_checkpoint
from fsdp_advisor.policies.dtypes import FP32_BYTES, ITEM_BYTES, loaded_bytes, stored_bytes
from fsdp_advisor.program.storages import NO_STORAGES, Storages

BLOCK, NESTED_BLOCK = 64, 256
"""Elements of a weight in 4 bits that share a scale in fp32, and scales that share one of their own. Source: bitsandbytes 0.50,
nn/modules.py, `Params4bit`; functional.py, `quantize_4bit`.
"""
TABLE_4BIT_BYTES, TABLE_8BIT_BYTES = 64, 1024
"""Bytes of the tables of 4-bit and 8-bit codes: 16 and 256 values in fp32."""
_FIRST, _SECOND = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How one layer is merged. `weight_bytes`: bytes per element of the base's weight, after unpacking if it is quantized."""

    method: QuantizationMethod | None
    is_nested: bool
    is_dora: bool
    weight_bytes: int


def _form(peft: Mapping[str, Any], quantization: Mapping[str, Any], plan: Plan) -> _Form:
    is_dora = bool(peft.get("use_dora"))
    if not quantization:
        return _Form(method=None, is_nested=False, is_dora=is_dora, weight_bytes=plan.param_bytes)
    quantized = Quantization.from_keywords(quantization)
    unpacked = FP32_BYTES if quantized.method == "bnb_8bit" else ITEM_BYTES[quantized.compute_dtype]
    return _Form(method=quantized.method, is_nested=quantized.nested, is_dora=is_dora, weight_bytes=unpacked)


def merge_method(profile: Profile, plan: Plan) -> SaveMethod | None:
    """How the adapters are merged after training; None for a model without LoRA, and for variants of LoRA that merge differently.

    Under DDP the trained model is merged on its GPU. A sharded model cannot be: a separate process loads base and adapters on the host.
    """
    adaptation = profile.config.get(CONFIG_KEY)
    values: Mapping[str, Any] = adaptation if isinstance(adaptation, dict) else {}
    peft, quantization = values.get("peft") or {}, values.get("quantization") or {}
    other_forms = peft.get("target_parameters") or peft.get("lora_bias")
    if peft.get("peft_type") != "LORA" or other_forms or is_packed_checkpoint(quantization):
        return None
    on_gpu = plan.backend == "ddp"
    if quantization and not on_gpu:
        return None
    form = _form(peft, quantization, plan)
    layers = (pair for unit, _ in profile.counted_units() for pair in _pairs(unit))
    largest = max((_merge(second, first, plan, form) for first, second in layers), default=0)
    files = _files(profile.base, plan, quantization)
    loaded = profile.bytes_of(lambda p: loaded_bytes(plan, p))
    return SaveMethod(
        way="merged",
        how=(
            "model.merge_and_unload() on the GPU of rank 0, then save_pretrained"
            if on_gpu
            else "PeftModel.from_pretrained(base, adapters).merge_and_unload() in a process of its own on the host, then save_pretrained"
        ),
        gpu_bytes=largest if on_gpu else 0,
        first_rank_host_bytes=files.tensor_bytes if on_gpu else loaded + largest,
        other_ranks_host_bytes=0,
        ranks_per_node=plan.ranks_per_node,
        files=(files,),
    )


def _files(base: Profile, plan: Plan, quantization: Mapping[str, Any]) -> Files:
    if not quantization:
        return pretrained_files(base, lambda p: loaded_bytes(plan, p))
    stored = base.bytes_of(lambda p: loaded_bytes(plan, p)) + base.scales_bytes
    return Files(name="model.safetensors", tensor_bytes=stored)


def _pairs(unit: Unit) -> Iterator[tuple[Parameter, Parameter]]:
    """(A, B) of each layer that LoRA adapts: matrices of shape (rank, inputs) and (outputs, rank)."""
    named = {p.name: p for p in unit.parameters}
    for name, first in named.items():
        second = named.get(name.removesuffix(_FIRST) + _SECOND)
        if name.endswith(_FIRST) and second is not None:
            yield first, second


def _merge(second: Parameter, first: Parameter, plan: Plan, form: _Form) -> int:
    """Bytes of the tensors at the peak of merging one layer. `first`, `second`: LoRA's matrices A and B."""
    rows, elements = second.shape[0], second.shape[0] * first.shape[1]
    adapter_bytes = stored_bytes(plan, second)
    merged_bytes = max(form.weight_bytes, adapter_bytes)

    def matrices(*element_bytes: int) -> Storages:
        return sum((Storages.of(elements * n_bytes) for n_bytes in element_bytes), NO_STORAGES)

    if form.is_dora:
        return (matrices(*_dora(form, adapter_bytes)) + Storages.of(rows * merged_bytes, 2)).rounded
    match form.method:
        case None:  # B A, and B A scaled
            return matrices(adapter_bytes, adapter_bytes).rounded
        case "bnb_8bit":  # the weight, the scaled product, their sum; in fp16 on the GPU; quantized, with its scales
            return (
                matrices(form.weight_bytes, adapter_bytes, adapter_bytes, 2, 1) + Storages.of(rows * FP32_BYTES)
            ).rounded
        case "bnb_4bit":
            # the scaled product, the weight, their sum, the sum again on the GPU, and this packed with its scales
            return (
                matrices(adapter_bytes, form.weight_bytes, merged_bytes, merged_bytes)
                + Storages.of(elements // 2)
                + _scales(elements, is_nested=form.is_nested)
            ).rounded
        case _:
            assert_never(form.method)


def _dora(form: _Form, adapter_bytes: int) -> list[int]:
    """Bytes per element of each matrix that is alive at the peak of merging DoRA.

    The matrices are the scaled product B A, a copy of the weight, their sum, the sum times the magnitudes, and its copy in the weight's
    dtype if that differs. A quantized weight is unpacked twice. Norms and magnitudes are vectors, which the caller counts.
    """
    merged_bytes = max(form.weight_bytes, adapter_bytes)
    converted = [form.weight_bytes] if merged_bytes != form.weight_bytes else []
    unpacked = [form.weight_bytes] * 2 if form.method else []
    return [adapter_bytes, form.weight_bytes, merged_bytes, merged_bytes, *converted, *unpacked]


def _scales(elements: int, *, is_nested: bool) -> Storages:
    """Storages while a matrix is quantized to 4 bits: its scales, the table of codes, and that table's absolute values and their maximum.

    Nested quantization has, instead of the last two, the scales' mean, the scales minus the mean, and these quantized to 8 bits.
    """
    blocks = -(-elements // BLOCK)
    scales = Storages.of(blocks * FP32_BYTES) + Storages.of(TABLE_4BIT_BYTES)
    if not is_nested:
        return scales + Storages.of(TABLE_4BIT_BYTES) + Storages.of(FP32_BYTES)
    nested = Storages.of(blocks) + Storages.of(-(-blocks // NESTED_BLOCK) * FP32_BYTES)
    return scales + Storages.of(FP32_BYTES) + Storages.of(blocks * FP32_BYTES) + nested + Storages.of(TABLE_8BIT_BYTES)
