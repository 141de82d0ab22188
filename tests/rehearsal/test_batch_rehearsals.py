"""Steps with packed, padding-free and padded batches of TRL and the Trainer on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import taken
from rehearsed_jobs import row_of

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 50_000, "max_position_embeddings": 8192,
}  # fmt: skip
JOBS = dict(
    taken(
        [
            ("packed", ("trl packed", "sdpa", "bf16-mixed", 2, 1024)),
        ],
        [
            ("padding-free", ("trl padding-free", "sdpa", "bf16", 3, 1024)),
            ("padded by the Trainer", ("padded", "sdpa", "bf16", 4, 1600)),
            ("packed, eager", ("trl packed", "eager", "bf16", 2, 1024)),
            ("padded by TRL", ("trl padded", "sdpa", "bf16-mixed", 4, 1600)),
            ("flattened by the Trainer", ("flattened", "sdpa", "bf16-mixed", 2, 1024)),
        ],
    )
)
"""Batch, attention, precision, micro-batch, sequence length."""
OPTIONS: dict[str, dict[str, Any]] = {
    "trl packed": {"framework": "trl", "packing": "bfd"},
    "trl padding-free": {"framework": "trl", "padding_free": True},
    "trl padded": {"framework": "trl", "padding_fraction": 0.3},
    "flattened": {"framework": "trainer", "padding_free": True},
    "padded": {"framework": "trainer", "padding_fraction": 0.3},
}


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("batches.py", json.dumps(CONFIG), json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_the_batch_of_the_collator_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    kind, attention, precision, batch, length = JOBS[name]
    row = row_of(
        tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]}, precision=precision, micro_batch_size=batch, seq_len=length,
        attention=attention, **OPTIONS[kind],
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
