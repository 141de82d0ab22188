"""Reads torchtune's YAML recipes.

Source: torchtune 0.6.1 and 0.7.0, recipes/full_finetune_distributed.py, recipes/full_finetune_single_device.py, recipes/configs/,
models/llama3_1/_component_builders.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from fsdp_advisor.configs.adapters import set_lora, set_quantization
from fsdp_advisor.configs.collect import Collector, truth
from fsdp_advisor.configs.names import hub_name, set_optimizer
from fsdp_advisor.job.unknown_options import TASKS_OF_TRL

MODELS = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4_14b": "microsoft/phi-4",
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "code_llama2_7b": "codellama/CodeLlama-7b-hf",
}
"""The Hugging Face models of torchtune's builders. Qwen2 and Qwen2.5 follow a rule instead."""
_QWEN = re.compile(r"(qwen2(?:_5)?)_(\d+(?:_\d+)?)b(?:_(?:base|instruct))?")
_ADAPTER = re.compile(r"^(lora|qlora|dora|qdora)_")
_TOPICS = {
    "torch.compile": ("compile",),
    "activation offload": ("enable_activation_offloading",),
    "gradients are freed during backward": ("optimizer_in_bwd",),
    "tensor parallelism": ("tensor_parallel_dim", "tensor_parallel_plan"),
    "context and sequence parallelism": ("context_parallel_dim",),
    "selective activation checkpointing": ("ac_mode", "ac_option"),
    "packed sequences": ("dataset.packed",),
    "chunked loss": ("loss.num_output_chunks",),
    "fp8": ("enable_fp8_training",),
    "validation": ("run_val_every_n_steps",),
    "quantization-aware training": ("quantizer",),
    "embeddings of the tokenizer's size": ("resize_token_embeddings",),
    "separate units of the embedding and the head": ("memory_efficient_fsdp_wrap",),
    "which parts of the model are trained": (
        "model.decoder_trainable",
        "model.encoder_trainable",
        "model.fusion_trainable",
    ),
}


def is_torchtune(keys: Mapping[str, Any]) -> bool:
    sections = [value for value in keys.values() if isinstance(value, Mapping)]
    return any("torchtune" in str(section.get("_component_", "")) for section in sections)


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a recipe's configuration. torchtune shards with FSDP2, one unit per layer."""
    found = Collector(file, "torchtune", keys)
    options = found.options
    options["framework"] = "torch"
    for section in ("model", "checkpointer", "tokenizer", "optimizer", "dataset", "loss"):
        found.section(section)
    _loss(found)
    if "teacher_model" in found:
        _refuse_teacher(found, "teacher_model")
    _model(found)
    found.number("batch_size", "micro_batch_size")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    found.number("tokenizer.max_seq_len", "seq_len")
    found.number("dataset.max_seq_len", "seq_len")
    found.default("seq_len", 2048, "2048 tokens: the file does not limit samples (tokenizer.max_seq_len)")
    set_optimizer(
        found,
        "optimizer._component_",
        {"fused": found.take("optimizer.fused"), "momentum": found.peek("optimizer.momentum")},
    )
    options["precision"] = "fp32" if found.take("dtype") == "fp32" else "bf16"
    if found.flag("enable_activation_checkpointing"):
        options["activation_checkpointing"] = "full"
    _sharding(found)
    found.omits_key("custom_sharded_layers", "separate units; the estimate assumes that they are in the root unit")
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *names)
    return found


_LOSSES_IN_CHUNKS = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
"""Losses that compute the logits of a part of the tokens at a time.

Source: modules/loss/cross_entropy_loss.py and ce_chunked_output_loss.py. Until backward they keep log-probabilities in fp32: run in bf16
with 8 chunks, their peaks are 5 and 6.6 bytes for each logit, that of a loss of all logits is 12 (4.1 after forward, all three).
"""
_OF_PREFERENCES = re.compile(r"rlhf|dpo|ppo|grpo|\.rl\.")
"""Found in the names of the recipes, and of the modules of the losses, of preference and reinforcement learning."""


def _loss(found: Collector) -> None:
    """Report a loss that is not modelled."""
    component = str(found.peek("loss._component_") or "")
    name = component.rsplit(".", 1)[-1]
    if _OF_PREFERENCES.search(component):
        found.take("loss._component_")
        _refuse_preferences(found, f"loss._component_: {component}")
    elif name in _LOSSES_IN_CHUNKS:
        found.omits_key("loss._component_", "chunked loss; the estimate has all logits at once and needs more")
    elif name == "CrossEntropyLoss":
        found.take("loss._component_")
    else:
        found.omits_key("loss._component_", "another loss; the estimate assumes cross-entropy")


def _refuse_preferences(found: Collector, setting: str) -> None:
    found.refuses(f"{setting} (preference and reinforcement learning)", TASKS_OF_TRL)


def _refuse_teacher(found: Collector, setting: str) -> None:
    found.refuses(f"{setting} (knowledge distillation)", "training without a teacher is modelled")


def read_command(file: str, recipe: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of `tune run`: its overrides `key=value`, and the configuration of torchtune that it names."""
    name = keys.get("config")
    found = Collector(file, "torchtune", {key: value for key, value in keys.items() if key != "config"})
    found.options["framework"] = "torch"
    found.number("batch_size", "micro_batch_size")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    for key in ("tokenizer.max_seq_len", "dataset.max_seq_len"):
        found.number(key, "seq_len")
    if (checkpoints := found.flag("enable_activation_checkpointing")) is not None:
        found.options["activation_checkpointing"] = "full" if checkpoints else "none"
    if found.flag("fsdp_cpu_offload"):
        found.options["offload"] = "parameters"
    for key in keys:
        if not key.startswith(_WITHOUT_EFFECT):
            found.omits_key(key, "give the configuration file with this value in it")
    if isinstance(name, str):
        found.missing.append(f"{name}, which `tune cp {name} .` copies")
        size = re.match(r"(\w+)/(\d+(?:_\d+)?[bB])", name)
        model = MODELS.get(f"{size[1]}_{size[2].lower()}") if size else None
        if model is not None:
            found.default("model", model, f"the model is {model}, by the name of the configuration")
    if _OF_PREFERENCES.search(recipe):
        _refuse_preferences(found, recipe)
    elif "knowledge_distillation" in recipe:
        _refuse_teacher(found, recipe)
    if "distributed" in recipe:
        found.default("strategy", "zero3", "FSDP2, which distributed recipes use")
    return found


_WITHOUT_EFFECT = (
    "checkpointer.",
    "output_dir",
    "metric_logger.",
    "epochs",
    "max_steps",
    "seed",
    "log_",
    "dataset.source",
    "config",
)
"""Beginnings of keys that change neither memory nor time."""


def _model(found: Collector) -> None:
    component = str(found.take("model._component_") or "")
    builder = component.rsplit(".", 1)[-1]
    if _ADAPTER.match(builder):
        _lora(found, builder)
        builder = _ADAPTER.sub("", builder)
    qwen = _QWEN.fullmatch(builder)
    if qwen is not None:
        family = "Qwen2.5" if qwen[1] == "qwen2_5" else "Qwen2"
        name: str | None = f"Qwen/{family}-{qwen[2].replace('_', '.')}B"
    else:
        name = MODELS.get(builder)
    folder = PurePosixPath(str(found.peek("checkpointer.checkpoint_dir") or "")).name
    if name is not None:
        found.options["model"] = name
        found.assume(f"{builder} is {name}")
    elif folder:
        found.take("checkpointer.checkpoint_dir")
        found.options["model"] = hub_name(folder)
        found.assume(f"the model is {hub_name(folder)}, by the name of the checkpoint's folder")


def _sharding(found: Collector) -> None:
    replicas, shards = found.number("data_parallel_replicate_dim"), found.number("data_parallel_shard_dim")
    options = found.options
    if found.flag("fsdp_cpu_offload"):
        options["offload"] = "parameters"
    reshard = found.peek("fsdp_reshard_after_forward")
    found.take("fsdp_reshard_after_forward")
    strategy = "zero3" if reshard is None or truth(reshard) else "zero2"
    if replicas and replicas > 1 and (shards is None or shards > 1 or shards == -1):
        strategy = "hsdp"
        found.default("nnodes", replicas, f"{replicas} nodes, one for each replica")
    options |= {"strategy": strategy, "backend": "fsdp2"}


_MODULES_OF_TORCHTUNE = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _lora(found: Collector, builder: str) -> None:
    """Read the LoRA options of a torchtune model builder, such as `lora_llama3_8b` or `qlora_llama3_8b`."""
    modules = found.take("model.lora_attn_modules") or ["q_proj", "v_proj"]
    names = [_MODULES_OF_TORCHTUNE.get(str(name), str(name)) for name in modules]
    if truth(found.take("model.apply_lora_to_mlp") or False):
        names += ["gate_proj", "down_proj", "up_proj"]
    if truth(found.take("model.apply_lora_to_output") or False):
        names.append("lm_head")
    config = {
        "r": found.number("model.lora_rank") or 8,
        "lora_alpha": found.take("model.lora_alpha") or 16,
        "lora_dropout": found.take("model.lora_dropout") or 0.0,
        "target_modules": names,
        "use_dora": truth(found.take("model.use_dora") or False) or "dora" in builder.split("_")[0],
    }
    set_lora(found, config)
    found.omits("torchtune stores adapters in its dtype; the estimate assumes fp32, as PEFT does")
    if builder.startswith("q") or truth(found.take("model.quantize_base") or False):
        set_quantization(found, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True})
        found.omits("torchao's NF4; the estimate assumes bitsandbytes' 4 bits")
