"""The page's names for options, which replace the command line's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from fsdp_advisor.job.choices import Strategy
from fsdp_advisor.job.compatibility import label as strategy_name
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.frameworks import BACKEND_NAMES, FRAMEWORK_NAMES
from fsdp_advisor.job.search_request import RecommendRequest

_LABELS = {
    "gpus": "GPUs (total)",
    "nnodes": "Nodes",
    "gpu": "GPU type, or size",
    "micro_batch_size": "Micro-batch",
    "seq_len": "Sequence length",
    "optim": "Optimizer",
    "optim_args": "Settings of GaLore, APOLLO",
    "optim_target_modules": "Modules they project",
    "zero_buckets": "Sizes of DeepSpeed's buckets",
    "gradient_accumulation_steps": "Accumulation steps",
    "interconnect": "Network between nodes",
    "find": "Search for",
    "host_memory": "Host memory per node",
    "tokens": "Tokens to train on",
    "price": "Price per GPU hour",
    "wrap": "FSDP units",
    "use_orig_params": "FSDP1's use_orig_params",
    "state_dict_type": "FSDP's state dicts",
    "ignored_labels": "Fraction of labels ignored",
    "padding_fraction": "Padding",
    "images_per_sample": "Images per sample",
    "image_size": "Size of images",
    "image_max_pixels": "Largest image in pixels",
    "task": "Training task",
    "precompute_ref_log_probs": "Reference precomputed",
    "router_aux_loss_coef": "Weight of the routers' loss",
    "num_generations": "Completions per prompt",
    "max_completion_length": "Tokens per completion",
    "beta": "Weight of the reference",
    "num_iterations": "Updates with a batch",
    "steps_per_generation": "Micro-batches per generation",
    "use_vllm": "vLLM",
    "vllm_mode": "vLLM's place",
    "vllm_gpu_memory_utilization": "vLLM's fraction of a GPU",
    "vllm_enable_sleep_mode": "vLLM sleeps",
    "vllm_tensor_parallel_size": "GPUs per copy in vLLM",
    "vllm_max_model_length": "Longest sequence in vLLM",
    "eval_strategy": "Evaluation",
    "per_device_eval_batch_size": "Micro-batch of evaluation",
    "compute_metrics": "Metrics of logits",
    "prediction_loss_only": "Losses alone",
    "eval_accumulation_steps": "Batches kept on the GPU",
    "eval_samples": "Sequences to evaluate",
    "activation_offload": "Activations on the host",
    "compile": "torch.compile",
    "memory_budget": "Memory budget of the compiler",
    "cuda_graphs": "CUDA graphs",
    "fp8": "Products in fp8",
    "tiled_mlp": "MLP in shards",
    "use_liger_kernel": "Liger's kernels",
    "experts_implementation": "Code for experts",
    "expert_imbalance": "Busiest expert, times the mean",
    "kernel_packages": "Installed kernels",
    "allocator_conf": "Allocator settings",
    "margin": "Memory left free",
    "thorough": "Thorough search",
    "dtype": "Weights stored in",
    "use_peft": "LoRA adapters",
    "lora_r": "LoRA rank",
    "lora_alpha": "LoRA alpha",
    "lora_dropout": "LoRA dropout",
    "lora_target_modules": "Modules with adapters",
    "lora_target_parameters": "Parameters with adapters",
    "lora_modules_to_save": "Modules trained in full",
    "use_dora": "DoRA",
    "use_rslora": "rsLoRA",
    "lora_kernels": "axolotl's kernels for adapters",
    "peft_config": "PEFT adapter_config.json",
    "freeze": "Frozen parameters",
    "load_in_4bit": "Base in 4 bits",
    "load_in_8bit": "Base in 8 bits",
    "bnb_4bit_quant_type": "4-bit type",
    "use_bnb_nested_quant": "Nested quantization",
    "bnb_4bit_quant_storage": "4-bit storage",
    "quantize_moe_experts": "Experts in 4 bits",
}
_NAMES: Mapping[str, str] = {
    **{str(strategy): strategy_name(strategy) for strategy in get_args(Strategy)},
    **{str(name): text for names in (BACKEND_NAMES, FRAMEWORK_NAMES) for name, text in names.items()}, "trainer": "Trainer",
    "cpu": "CPU", "nvme": "NVMe",
    "auto": "choose for me", "all": "choose for me", "sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "reward model", "grpo": "GRPO",
}  # fmt: skip
_YES_NO = {"False": "no", "True": "yes"}
_NAMES_OF: Mapping[str, Mapping[str, str]] = {
    "find": {
        "": "the best plan",
        "gpus": "the fewest GPUs",
        "batch": "the largest micro-batch",
        "sequence": "the longest sequence",
        "gpu-type": "the smallest GPU",
    },
    "precision": {"": "usual"},
    "loss": {
        "auto": "the framework's",
        "full": "from all logits at once",
        "chunked": "in tiles or chunks",
        "liger": "Liger's",
        "cce": "cut cross entropy",
    },
    "activation_checkpointing": {
        "auto": "choose for me",
        "full": "all layers",
        "every-2": "every 2nd layer",
        "every-4": "every 4th layer",
    },
    "wrap": {"layer": "each layer", "none": "the whole model"},
}
_LISTS = re.compile(r"`?fsdp-advisor (models|gpus)`?")
_OPTION = re.compile(
    r"--([a-z]+(?:-[a-z0-9]+)*)|^([a-z][a-z0-9_]+)(?= (?:must|is) )|\b([a-z]+(?:_[a-z0-9]+)+|nnodes|optim)\b"
)


def label(option: str) -> str:
    """The label of an option.

    >>> label("seq_len"), label("activation_checkpointing")
    ('Sequence length', 'Activation checkpointing')
    """
    return _LABELS.get(option, option.replace("_", " ").capitalize())


def choice(option: str, value: str) -> str:
    """The name of one of an option's values.

    >>> choice("strategy", "zero3"), choice("find", "gpus"), choice("precision", "bf16")
    ('ZeRO-3', 'the fewest GPUs', 'bf16')
    """
    return _NAMES_OF.get(option, {**_NAMES, **_YES_NO}).get(value, value)


def words(text: str) -> str:
    """A message with the labels of options instead of their names.

    >>> words("gpus must be at least 1; give --host-memory"), words("seq_len 9 is past the maximum")
    ('“GPUs (total)” must be at least 1; give “Host memory per node”', '“Sequence length” 9 is past the maximum')
    >>> words("use --load-in-4bit")
    'use “Base in 4 bits”'
    """

    def labelled(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups())).replace("-", "_")
        return f"“{label(name)}”" if name in fields_of(RecommendRequest) else match[0]

    return _OPTION.sub(labelled, _LISTS.sub(r"the list of \1", text))
