"""Steps with packed, padding-free and padded batches of TRL and the Trainer on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rehearsed_jobs
from matrix import in_turn, taken

pytestmark = in_turn(3, of=5)

CONFIG = {**rehearsed_jobs.CONFIG, "num_hidden_layers": 2}
JOBS = dict(
    taken(
        [
            ("packed", ("trl packed", "sdpa", "bf16-mixed", 2, 1024, False)),
            ("padding-free, flash-attn", ("trl padding-free", "flash_attention_2", "bf16", 3, 1024, False)),
            ("packed, flash-attn, compiled", ("trl packed", "flash_attention_2", "bf16-mixed", 2, 4096, True)),
            ("padding-free, one sequence", ("trl padding-free", "sdpa", "bf16-mixed", 1, 1500, False)),
        ],
        [
            ("padding-free", ("trl padding-free", "sdpa", "bf16", 3, 1024, False)),
            ("padding-free, flash-attn, compiled", ("trl padding-free", "flash_attention_2", "bf16", 3, 4096, True)),
            ("padded by the Trainer", ("padded", "sdpa", "bf16", 4, 1600, False)),
            ("packed, eager", ("trl packed", "eager", "bf16", 2, 1024, False)),
            ("padded by TRL", ("trl padded", "sdpa", "bf16-mixed", 4, 1600, False)),
            ("flattened by the Trainer", ("flattened", "sdpa", "bf16-mixed", 2, 1024, False)),
            ("packed, flash-attn", ("trl packed", "flash_attention_2", "bf16-mixed", 2, 1024, False)),
            ("padded by TRL, flash-attn", ("trl padded", "flash_attention_2", "bf16-mixed", 4, 1600, False)),
            ("padded by the Trainer, flash-attn", ("padded", "flash_attention_2", "bf16", 4, 1600, False)),
        ],
        days=2,
    )
)
"""Batch, attention, precision, micro-batch, sequence length, and whether the model is compiled."""
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
    kind, attention, precision, batch, length, compiled = JOBS[name]
    row = rehearsed_jobs.row_of(
        tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]}, precision=precision, micro_batch_size=batch, seq_len=length,
        attention=attention, compile="model" if compiled else "none", **OPTIONS[kind],
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
