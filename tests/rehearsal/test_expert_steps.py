"""Steps of mixtures of experts on a simulated GPU, where all experts are chosen equally often, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(2, of=5)

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
JOBS: dict[str, list[Any]] = {
    f"{code}, {precision}": [QWEN, code, precision, 2, 256]
    for code, precision in taken(
        [("eager", "bf16-mixed"), ("batched_mm", "bf16-mixed")],
        [("grouped_mm", "bf16-mixed"), ("eager", "fp32"), ("batched_mm", "fp32")],
        days=2,
    )
}
"""Configuration, code for experts, precision, micro-batch and length."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("experts.py", json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_code_for_experts_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, code, precision, batch, length = JOBS[name]
    options = {"precision": precision, "micro_batch_size": batch, "seq_len": length, "experts_implementation": code}
    row = row_of(tmp_path, config, framework="trainer", **options)
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
