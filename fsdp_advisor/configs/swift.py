"""Reads the arguments of ms-swift's `swift sft` and `swift pt`, in a command or a YAML file, which train through the Trainer.

Source: ms-swift 4.6.0, arguments/{sft_args,tuner_args}.py, arguments/base_args/{base_args,model_args,quant_args}.py, trainers/arguments.py,
trainers/mixin.py, config/*.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from fsdp_advisor.configs.adapters import set_lora, set_quantization
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.llamafactory import catalogued, without_adapters
from fsdp_advisor.configs.llamafactory_towers import USUAL, Frozen
from fsdp_advisor.configs.trainer import read_into
from fsdp_advisor.model import catalog
from fsdp_advisor.model.multimodal import vision_parts
from fsdp_advisor.units import format_gpus

_OWN = (
    "tuner_type",
    "train_type",
    "tuner_backend",
    "torch_dtype",
    "quant_bits",
    "freeze_vit",
    "freeze_aligner",
    "attn_impl",
)
_FROZEN = ("freeze_vit", "freeze_aligner", "freeze_llm")
_ADAPTER = (
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "lora_dropout",
    "lora_alpha",
    "use_dora",
    "use_rslora",
)
_TOPICS = {
    "ms-swift's sequence parallelism": ("sequence_parallel_size",),
    "other optimizers": ("use_galore", "optimizer", "lisa_activated_layers"),
    "frozen parameters": ("freeze_parameters", "freeze_parameters_ratio", "freeze_parameters_regex"),
}
_DEEPSPEED = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2_offload": 2, "zero3_offload": 3}
"""Names of ms-swift's own configurations of DeepSpeed -> the stage."""
_DEFAULT_BATCH = 16
"""The global batch that a missing gradient_accumulation_steps makes."""


def is_swift(keys: Mapping[str, Any]) -> bool:
    """Whether the keys are those of a file for `swift sft`, which names its model and data set differently than other tools."""
    return "model" in keys and "dataset" in keys and bool(set(_OWN) & set(keys))


def read(file: str, keys: Mapping[str, Any], gpus: int = 1) -> Collector:
    """The settings of ms-swift's arguments. `gpus`: the ranks of the command, from which the default of accumulation follows."""
    found = Collector(file, "ms-swift", _as_trainers(keys))
    _adapters(found)
    _quantization(found)
    dtype = found.take("dtype")
    if dtype is None:
        found.assume("weights in bf16, the dtype of most checkpoints, with which ms-swift trains in bf16")
    half = str(dtype or "bfloat16")
    for key, value in (("bf16", half == "bfloat16"), ("fp16", half != "bfloat16")):
        if found.peek(key) is None:
            found.replace(key, value)
    found.options["dtype"] = half
    found.default("micro_batch_size", 1, "micro-batch 1, ms-swift's default of per_device_train_batch_size")
    batch = found.peek_number("per_device_train_batch_size") or 1
    steps = max(1, ceil(_DEFAULT_BATCH / batch / gpus))
    why = f"accumulation {steps}, with which ms-swift makes batches of {_DEFAULT_BATCH} on {format_gpus(gpus)}"
    found.default("gradient_accumulation_steps", steps, why)
    _engine(found)
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *names)
    read_into(found)
    checkpoints, backend = found.options.get("activation_checkpointing") == "full", found.options.get("backend")
    if checkpoints and (backend == "deepspeed" or (gpus == 1 and backend is None)):
        found.options["activation_checkpointing"] = "reentrant"
    found.omits("logits of prompts, which ms-swift leaves out if it can (use_logits_to_keep)")
    found.guess("strategy", "ddp", "DDP, because neither deepspeed nor fsdp is set")
    return found


def _as_trainers(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under the names that the Trainer and other consumers have for them, with ms-swift's defaults."""
    renamed = {
        "model": "model_name_or_path",
        "torch_dtype": "dtype",
        "attn_impl": "attn_implementation",
        "train_type": "tuner_type",
    }
    found = {renamed.get(key, key): value for key, value in keys.items()}
    if found.get("attn_implementation") == "flash_attn":
        found["attn_implementation"] = "flash_attention_2"
    return {"gradient_checkpointing": True, "tuner_type": "lora", **found}


def _adapters(found: Collector) -> None:
    """Set LoRA, which is the default, or report another tuner."""
    tuner = str(found.take("tuner_type"))
    config = {key: value for key in _ADAPTER if (value := found.take(key)) is not None}
    rank = found.number("lora_rank") or 8
    tower, aligner, language = (found.flag(key) for key in _FROZEN)
    frozen = (tower is not False, aligner is not False, bool(language))
    if tuner in ("lora", "longlora"):
        usual = {"target_modules": "all-linear", "lora_alpha": 32, "lora_dropout": 0.05}
        config = {**usual, **config, "r": rank}
        if config["target_modules"] in ("all-linear", ["all-linear"]):
            config |= {
                "target_modules": "all-linear",
                "exclude_modules": without_adapters(found, frozen, "all-linear", everywhere=False),
            }
        set_lora(found, config)
    elif tuner != "full":
        found.refuses(f"tuner_type: {tuner}", "possible are lora and full; --peft-config reads any method of PEFT")
    else:
        _freeze(found, frozen)


def _freeze(found: Collector, frozen: Frozen) -> None:
    """Freeze the vision tower and the aligner of a catalogued multimodal model in full fine-tuning, as ms-swift does by default."""
    entry = catalogued(found)
    parts = tuple(vision_parts(catalog.profile(entry))) if entry else ()
    if parts and frozen == USUAL:
        found.options["freeze"] = parts
        found.assume(f"{' and '.join(parts)} frozen: the vision tower and the aligner, which ms-swift freezes")
    elif parts and any(frozen):
        found.omits(
            "freeze_vit, freeze_aligner and freeze_llm other than the defaults: name the frozen parameters with freeze"
        )


def _quantization(found: Collector) -> None:
    """Set the base in 4 or 8 bits by bitsandbytes."""
    bits, method = found.number("quant_bits"), found.take("quant_method")
    if bits is None:
        return
    if method not in (None, "bnb") or bits not in (4, 8):
        found.refuses(f"quant_method: {method}, quant_bits: {bits}", "possible are 4 and 8 bits by bitsandbytes")
        return
    double = found.flag("bnb_4bit_use_double_quant")
    set_quantization(
        found,
        {
            f"load_in_{bits}bit": True,
            "bnb_4bit_quant_type": found.take("bnb_4bit_quant_type") or "nf4",
            "bnb_4bit_use_double_quant": double is not False,
            "bnb_4bit_quant_storage": found.take("bnb_4bit_quant_storage"),
        },
    )
    found.omits(
        "ms-swift leaves norms, embeddings and head of a quantized base in 16 bits; the estimate has them in fp32"
    )


def _engine(found: Collector) -> None:
    """Set DeepSpeed or FSDP2 from the names of ms-swift's own configurations. The Trainer reads others."""
    name = found.peek("deepspeed")
    if isinstance(name, str) and name in _DEEPSPEED:
        stage = _DEEPSPEED[name]
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto" if stage == 3 else 200_000_000}
        if name.endswith("_offload"):
            sections = ("offload_optimizer", "offload_param") if name == "zero3_offload" else ("offload_optimizer",)
            zero |= {section: {"device": "cpu"} for section in sections}
        found.reads(f"deepspeed: {name}")
        found.replace("deepspeed", {"zero_optimization": zero, "bf16": {"enabled": "auto"}})
    elif found.peek("fsdp") == "fsdp2":
        found.take("fsdp")
        found.take("gradient_checkpointing")
        found.options |= {"strategy": "zero3", "backend": "fsdp2", "activation_checkpointing": "full"}
