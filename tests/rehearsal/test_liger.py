"""Steps of models with Liger's kernels on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(0, of=4)

SHAPES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 100, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
"""The vocabulary is small, so that the peak is in a layer. Sequences are long, so that what the allocator adds to a block is little."""
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
Job = tuple[dict[str, Any], str, bool, bool, int, int]


def _job(model: str, precision: str, *, checkpoints: bool = False, adapts: bool = False, **values: Any) -> Job:
    return {"model_type": model, **SHAPES, **values}, precision, checkpoints, adapts, 4, 4000


JOBS: dict[str, Job] = {
    "llama, autocast, adapters": _job("llama", "bf16-mixed", adapts=True),
    "qwen3_moe, half precision": _job("qwen3_moe", "bf16", **EXPERTS),
    "gemma3, autocast, checkpointed": _job("gemma3_text", "bf16-mixed", checkpoints=True),
}
MODELS = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "olmo2", "glm4", "exaone4", "smollm3",
    "hunyuan_v1_dense", "nemotron", "mixtral", "qwen3_moe",
)  # fmt: skip
MORE: dict[str, Job] = {
    f"{model}, {precision}, checkpoints {checkpoints}, adapts {adapts}": _job(
        model,
        precision,
        checkpoints=checkpoints,
        adapts=adapts,
        **(EXPERTS if model in ("mixtral", "qwen3_moe") else {}),
    )
    for model, precision, checkpoints, adapts in product(MODELS, ("bf16-mixed", "bf16"), (False, True), (False, True))
    if not (adapts and model in ("mixtral", "qwen3_moe"))  # Liger fails with adapters of experts
}
CASES: dict[str, Job] = dict(taken(list(JOBS.items()), list(MORE.items()), days=3))
"""Configuration, precision, whether layers are checkpointed, whether adapters are trained, micro-batch, sequence length."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("liger.py", json.dumps(CASES))


@pytest.mark.parametrize("name", CASES)
def test_ligers_kernels_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, precision, checkpoints, adapts, batch, length = CASES[name]
    adapters: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"} if adapts else {}
    if adapts and precision == "bf16-mixed":
        adapters["dtype"] = "float32"  # the script makes the base in fp32, not as a checkpoint in half precision
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, framework="trainer", use_liger_kernel=True,
        activation_checkpointing="full" if checkpoints else "none", **adapters,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
