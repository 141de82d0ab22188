"""Helpers for tests of trainers on simulated GPUs. Settings are the trainer's, options are those of an estimate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_advisor import estimate
from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.memory.libraries import WORKSPACES, cublas_workspace_bytes
from fsdp_advisor.strategy_estimate import StrategyEstimate

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 50_000, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = {
    "precision": "bf16-mixed", "per_device_train_batch_size": 2, "length": 1024, "gradient_checkpointing": False,
}  # fmt: skip
FSDP2_SETTINGS = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
    },
}  # fmt: skip
FSDP2_OPTIONS = {"gpus": 2, "strategy": "zero3", "backend": "fsdp2"}
ZERO3_SETTINGS = {
    "deepspeed": {
        "zero_optimization": {
            "stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    },
}  # fmt: skip
ZERO3_OPTIONS = {"gpus": 2, "strategy": "zero3", "backend": "deepspeed"}
LORA_SETTINGS = {"lora": True}
LORA_OPTIONS = {"use_peft": True, "lora_r": 16, "lora_target_modules": "q_proj,v_proj"}


def predicted(folder: Path, **options: Any) -> StrategyEstimate:
    """The estimate of a job of TRL with CONFIG and SETTINGS, changed by the options."""
    usual = {"framework": "trl", "precision": "bf16-mixed", "micro_batch_size": 2, "seq_len": 1024}
    return row_of(folder, {**CONFIG, "architectures": ["LlamaForCausalLM"]}, **{**usual, **options})


def row_of(folder: Path, config: Mapping[str, Any], **options: Any) -> StrategyEstimate:
    """The only row of a job on one H100 with DDP, without checkpointing unless the options say otherwise."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    usual = {"gpu": "H100-80GB", "strategy": "ddp", "activation_checkpointing": "none"}
    (row,) = estimate(model=str(path), **{**usual, **options}).estimates
    return row


def requested_bytes(row: StrategyEstimate) -> int:
    """Bytes that a step of `row_of` requests from the allocator at its peak: its tensors and cuBLAS's workspaces."""
    assert row.peak_tensor_bytes is not None
    return row.peak_tensor_bytes + WORKSPACES * cublas_workspace_bytes(find_gpu("H100-80GB").compute_capability)


def has_axolotl(python: Path) -> bool:
    """Whether the environment of a Python has axolotl."""
    return any(python.parents[1].glob("lib/python*/site-packages/axolotl"))
