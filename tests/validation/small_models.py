"""Small models for jobs whose prediction is compared with PyTorch's engines around the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Case = dict[str, str]
"""The options of a job; `model` names one of the small models."""
Configs = Mapping[str, Mapping[str, Any]]


def small_models(*, vocabulary: int, layers: int = 4, **more: Mapping[str, Any]) -> Configs:
    """Configurations by name. `more`: by name, keys that a configuration also has, or a whole one."""
    size = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }  # fmt: skip
    grouped = {**size, "num_key_value_heads": 2}
    found: dict[str, dict[str, Any]] = {
        "llama": {**grouped, "model_type": "llama"},
        "qwen3": {**grouped, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
        "mistral": {**grouped, "model_type": "mistral"},
        "gemma2": {**grouped, "model_type": "gemma2", "head_dim": 32},
        "gemma3": {**grouped, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 64},
        "phi3": {**size, "model_type": "phi3", "num_key_value_heads": 4, "pad_token_id": 0},
        "mixtral": {**grouped, "model_type": "mixtral", "num_local_experts": 4},
        "falcon": {**size, "model_type": "falcon", "bias": False},
        "olmo2": {**size, "model_type": "olmo2"},
        "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": layers, "n_head": 4, "vocab_size": vocabulary, "n_positions": 512},
        "bert": {**size, "model_type": "bert"},
        "t5": {
            "model_type": "t5", "d_model": 128, "d_ff": 256, "num_layers": layers, "num_heads": 4, "d_kv": 32, "vocab_size": vocabulary,
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        },
    }  # fmt: skip
    return {name: {**config, **more.get(name, {})} for name, config in found.items()}


def name_of(case: Case) -> str:
    """The name of a case in pytest's output."""
    return " ".join(value if name == "model" else f"{name}={value}" for name, value in case.items())


def options_of(configs: Configs, case: Case, folder: Path) -> Case:
    """The options of the case's job, with the model's configuration in a file of the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(configs[case["model"]]))
    return {"seq_len": "128", "micro_batch_size": "2", **case, "model": str(path)}
