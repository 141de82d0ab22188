"""Predicted peaks with padded batches and with batches in one row against PyTorch's engines around the same model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase. `tests/rehearsal/test_batch_rehearsals.py` compares the
batches themselves with the libraries' data collators.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import taken

pytest.importorskip("torch")

from fsdp_advisor.errors import NotRecordable  # after the check
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

_DECODER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 5_003,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "model_type": "llama", "num_key_value_heads": 2},
    "qwen3": {**_DECODER, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "mistral": {**_DECODER, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 64},
    "gemma3": {**_DECODER, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64},
    "mixtral": {**_DECODER, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    "olmo2": {**_DECODER, "model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 5_003, "n_positions": 512},
    "bert": {**_DECODER, "model_type": "bert"},
}  # fmt: skip
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "ddp", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp1", "gpus": "4"},
    {"strategy": "zero2", "backend": "fsdp2", "gpus": "4"},
)
BATCHES: tuple[dict[str, str], ...] = ({"packing": "bfd"}, {"padding_free": "true"}, {"padding_fraction": "0.3"})
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
VARIATIONS: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"precision": "bf16"},
    {"micro_batch_size": "1", "seq_len": "250"},
    {"use_peft": "true", "lora_target_modules": "all-linear"},
    {"loss": "chunked", "ignored_labels": "0.4"},
    {"gradient_accumulation_steps": "2"},
)

Case = dict[str, str]


def _names(case: Case) -> str:
    return " ".join(value if name == "model" else f"{name}={value}" for name, value in case.items())


FEW: list[Case] = [
    {"model": "llama", **ENGINES[0], **BATCHES[0], "attention": "flash_attention_2"},
    {"model": "llama", **ENGINES[2], **BATCHES[1], "attention": "sdpa"},
    {"model": "qwen3", **ENGINES[3], **BATCHES[2], "attention": "sdpa"},
    {"model": "llama", **ENGINES[2], **BATCHES[2], "attention": "flash_attention_2"},
]
MORE: list[Case] = [
    {"model": model, **ENGINES[(m + 2 * b + a) % 5], **VARIATIONS[(3 * m + b + 2 * a) % len(VARIATIONS)], **batch, "attention": attention}
    for (m, model), (b, batch), (a, attention) in product(enumerate(CONFIGS), enumerate(BATCHES), enumerate(ATTENTIONS))
    if model != "bert"
]  # fmt: skip


def predicted(case: Case, folder: Path) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[case["model"]]))
    return predict(make_request({"seq_len": "128", "micro_batch_size": "3", **case, "model": str(path)}))


@pytest.mark.parametrize("case", taken(FEW, MORE), ids=_names)
def test_predicted_peaks_equal_pytorch_with_other_batches(case: Case, tmp_path: Path) -> None:
    prediction = predicted(case, tmp_path)
    assert prediction.predicted["phase_peaks"] == simulate(prediction.source(), prediction.plan).phase_peaks


def test_a_masked_model_has_no_sequences_in_one_row(tmp_path: Path) -> None:
    with pytest.raises(NotRecordable, match="causal"):
        predicted({"model": "bert", **ENGINES[0], "padding_free": "true"}, tmp_path)
