"""A model small enough for real runs on a CPU, and the job that runs it."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
JOB: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 64, "attention": "eager"}
"""Eager attention, because transformers builds sdpa's mask only under fake tensors."""
