"""Steps of models with a gated delta rule on a simulated GPU with flash-linear-attention, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(4, of=5)

SHAPES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 100, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 256, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
"""The last layer is linear, its keys are wide, and the rest is small, so that the peak is in the backward of a gated delta rule."""
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 256, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "kv_lora_rank": 32, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "num_experts": 4, "num_experts_per_token": 2, "model_max_length": 4096,
    "linear_num_heads": 4, "linear_head_dim": 128, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""The same with Kimi delta attention."""
JOBS: dict[str, tuple[dict[str, Any], str, int, int]] = dict(
    taken(
        [
            (
                "autocast, with a last chunk that is not full",
                ({"model_type": "qwen3_5_text", **SHAPES}, "bf16-mixed", 4, 200),
            ),
            ("half precision, with experts", ({"model_type": "qwen3_next", **SHAPES, **EXPERTS}, "bf16", 4, 256)),
            ("Kimi delta attention", (KIMI, "bf16-mixed", 4, 200)),
        ],
        [],
        days=2,
    )
)
"""Configuration, precision, micro-batch, sequence length."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("linear_attention.py", json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_the_kernels_of_the_packages_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, precision, batch, length = JOBS[name]
    row = row_of(tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, framework="trainer")
    assert row.peak_phase == "backward"
    assert row.peak_where is not None and "DecoderLayer" in row.peak_where
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-4)
