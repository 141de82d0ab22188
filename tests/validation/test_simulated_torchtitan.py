"""Predicted peaks under torchtitan against its own model, loss, checkpointing, sharding and clipping, as rank 0 of a fake process group.

Each is one steady step under fake tensors, equal to the byte in each phase.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

from compared_peaks import predicted_and_simulated

from fsdp_advisor import estimate
from fsdp_advisor.errors import NotRecordable, UsageError
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.validation.predict import predict

pytestmark = pytest.mark.slow

_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 32_000, "max_position_embeddings": 2048,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "llama, tied": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False},
    "qwen3, tied": {**_SIZES, "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True},
    "mistral": {**_SIZES, "model_type": "mistral"},
}
JOBS: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"loss": "full"},
    {"strategy": "zero2", "micro_batch_size": "1"},
    {"precision": "bf16"},
    {"precision": "fp32", "activation_checkpointing": "full"},
    {"gpus": "7", "gradient_accumulation_steps": "3"},
    {"strategy": "hsdp", "gpus": "8", "nnodes": "2", "gradient_accumulation_steps": "2"},
    {"strategy": "hsdp", "gpus": "8", "nnodes": "2", "activation_checkpointing": "full", "precision": "bf16"},
    {"gpus": "1"},
    {"gpus": "1", "loss": "full", "precision": "bf16"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "selective", "loss": "full", "gpus": "7"},
)  # fmt: skip
FEW = [
    {"model": "llama", **JOBS[11]},
    {"model": "qwen3, tied", **JOBS[1]},
]
MORE = [
    {"model": model, **job}
    for model, job in product(list(CONFIGS)[:4], JOBS)
    if not ("tied" in model and job == JOBS[7])  # a shard of the weight's gradient is missing in forward
]


def asked(case: dict[str, str], folder: Path) -> dict[str, str]:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[case["model"]]))
    usual = {"framework": "torchtitan", "strategy": "zero3", "gpus": "4", "micro_batch_size": "2", "seq_len": "128"}
    return {**usual, **case, "model": str(path)}


@in_turn(4, of=5)
@pytest.mark.parametrize("case", taken(FEW, MORE, days=2), ids=lambda case: " ".join(case.values()))
def test_predicted_peaks_equal_torchtitans_step(case: dict[str, str], tmp_path: Path) -> None:
    predicted, simulated = predicted_and_simulated(make_request(asked(case, tmp_path)))
    assert predicted == simulated


@in_turn(3, of=5)
def test_the_default_loss_keeps_an_eighth_of_the_logits(tmp_path: Path) -> None:
    rows = {}
    for loss in ("full", "auto"):
        case = {"model": "llama", "loss": loss, "activation_checkpointing": "full", "seq_len": "2048"}
        rows[loss] = predict(make_request(asked(case, tmp_path))).predicted["phase_peaks"]
    logits = 2 * 2048 * _SIZES["vocab_size"]
    assert rows["auto"]["forward"] < rows["full"]["forward"] < rows["full"]["backward"]
    assert rows["full"]["backward"] - max(rows["auto"].values()) > 4 * logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "liger"}, "does not accept --loss liger"),
        ({"use_peft": "true"}, "adapters"),
        ({"strategy": "ddp"}, "no strategy ddp"),
        ({"backend": "fsdp1"}, "no backend fsdp1"),
        ({"seq_len": "129"}, "8 equal chunks"),
        ({"precision": "fp16-mixed"}, "fp16"),
        ({"attention": "eager"}, "no attention eager"),
        ({"wrap": "none"}, "units"),
    ],
)
def test_what_torchtitan_does_not_have_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(make_request(asked({"model": "llama", **options}, tmp_path)))


def test_a_model_that_torchtitan_has_no_class_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRecordable, match="of type mistral"):
        estimate(make_request(asked({"model": "mistral"}, tmp_path)))
