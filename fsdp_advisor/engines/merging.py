"""Merging adapters into their base: the memory of PEFT's `merge_and_unload`, which visits one layer after the other.

Source: peft 0.21, tuners/lora/layer.py, `Linear.merge` and `get_delta_weight`; tuners/lora/bnb.py, `Linear4bit.merge`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.job.adaptation import CONFIG_KEY
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.quantization import Quantization
from fsdp_advisor.policies.dtypes import FP32_BYTES, ITEM_BYTES, loaded_bytes, stored_bytes
from fsdp_advisor.program.storages import Storages

BLOCK = 64
"""Elements of a weight in 4 bits that share a scale in fp32. Source: bitsandbytes 0.50, nn/modules.py, `Params4bit`."""
_FIRST, _SECOND = ".lora_A.default.weight", ".lora_B.default.weight"


def merge_method(profile: Profile, plan: Plan) -> SaveMethod | None:
    """How the adapters are merged after training; None for a model without LoRA, and for forms of it that merge in other ways.

    Under DDP the trained model merges on its GPU. A sharded model cannot: a process of its own loads base and adapters on the host.
    """
    adaptation = profile.config.get(CONFIG_KEY)
    values: Mapping[str, Any] = adaptation if isinstance(adaptation, dict) else {}
    peft, quantization = values.get("peft") or {}, values.get("quantization") or {}
    in_4bit = bool(quantization.get("load_in_4bit"))
    other_forms = peft.get("use_dora") or peft.get("target_parameters") or peft.get("lora_bias")
    if peft.get("peft_type") != "LORA" or other_forms or (quantization and not in_4bit):
        return None
    on_gpu = plan.backend == "ddp"
    if quantization and not on_gpu:
        return None
    largest = max((_bytes_of_merge(unit, plan, quantization) for unit, _ in profile.counted_units()), default=0)
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
    scales = sum(b.n_bytes * count for unit, count in base.counted_units() for b in unit.buffers if not b.registered)
    return Files(name="model.safetensors", tensor_bytes=base.bytes_of(lambda p: loaded_bytes(plan, p)) + scales)


def _bytes_of_merge(unit: Unit, plan: Plan, quantization: Mapping[str, Any]) -> int:
    """Bytes that merging the largest layer of a unit allocates at its peak, with the merged weight of a base in 4 bits."""
    return max((_merge(second, first, plan, quantization) for first, second in _pairs(unit)), default=0)


def _pairs(unit: Unit) -> Iterator[tuple[Parameter, Parameter]]:
    """The two matrices of each adapter: (R, inputs) and (outputs, R)."""
    named = {p.name: p for p in unit.parameters}
    for name, first in named.items():
        second = named.get(name.removesuffix(_FIRST) + _SECOND)
        if name.endswith(_FIRST) and second is not None:
            yield first, second


def _merge(second: Parameter, first: Parameter, plan: Plan, quantization: Mapping[str, Any]) -> int:
    """The product and the scaled product. In 4 bits: the scaled product, the weight, their sum, the sum again on the GPU, and this packed
    with its scales.
    """
    elements, adapter_bytes = second.shape[0] * first.shape[1], stored_bytes(plan, second)
    product = Storages.of(elements * adapter_bytes)
    if not quantization:
        return (product + product).rounded
    weight_bytes = ITEM_BYTES[Quantization.from_keywords(quantization).compute_dtype]
    weight, merged = Storages.of(elements * weight_bytes), Storages.of(elements * max(weight_bytes, adapter_bytes))
    packed = Storages.of(elements // 2) + Storages.of(-(-elements // BLOCK) * FP32_BYTES)
    return (product + weight + merged + merged + packed).rounded
