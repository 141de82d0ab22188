"""Steps of torchtitan 0.3's own code on a simulated GPU, compared with the prediction.

FlexAttention is always compiled; in a compiled layer it is a part of the layer's graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = [in_turn(1, of=2), pytest.mark.usefixtures("torchao")]

CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": name, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": head_dim, "vocab_size": 4096, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }
    for name, head_dim in (("llama", 64), ("qwen3", 128))
}  # fmt: skip
Job = tuple[str, bool, str, int, int, str, bool]
CASES: dict[str, tuple[str, Job]] = dict(
    taken(
        [
            ("llama, selective", ("llama", ("selective", False, "bf16-mixed", 4, 8192, "none", False))),
            ("llama, selective, compiled", ("llama", ("selective", True, "bf16-mixed", 4, 8192, "none", False))),
            ("qwen3, full, compiled", ("qwen3", ("full", True, "bf16-mixed", 2, 8192, "none", False))),
            (
                "qwen3, selective, compiled, fp8",
                ("qwen3", ("selective", True, "bf16-mixed", 4, 8192, "rowwise", False)),
            ),
            ("llama, full, as a graph", ("llama", ("full", False, "bf16-mixed", 4, 8192, "none", True))),
            ("llama, selective, fp8", ("llama", ("selective", False, "bf16-mixed", 4, 8192, "rowwise", False))),
        ],
        [
            ("llama, selective, as a graph", ("llama", ("selective", False, "bf16-mixed", 4, 8192, "none", True))),
            (
                "qwen3, selective, compiled, as a graph",
                ("qwen3", ("selective", True, "bf16-mixed", 2, 8192, "none", True)),
            ),
            ("llama", ("llama", ("none", False, "bf16-mixed", 4, 8192, "none", False))),
            ("llama, full", ("llama", ("full", False, "bf16-mixed", 4, 8192, "none", False))),
            ("qwen3, selective", ("qwen3", ("selective", False, "bf16-mixed", 2, 8192, "none", False))),
            ("llama, compiled", ("llama", ("none", True, "bf16-mixed", 4, 8192, "none", False))),
            ("llama, full, compiled", ("llama", ("full", True, "bf16-mixed", 4, 8192, "none", False))),
            ("llama, compiled, in half precision", ("llama", ("selective", True, "bf16", 3, 8192, "none", False))),
            ("llama, compiled, in fp32", ("llama", ("selective", True, "fp32", 2, 4096, "none", False))),
            ("qwen3, compiled", ("qwen3", ("none", True, "bf16-mixed", 2, 8192, "none", False))),
            ("qwen3, selective, compiled", ("qwen3", ("selective", True, "bf16-mixed", 2, 8192, "none", False))),
            (
                "llama, selective, compiled, fp8",
                ("llama", ("selective", True, "bf16-mixed", 4, 8192, "rowwise", False)),
            ),
            ("llama, full, compiled, fp8", ("llama", ("full", True, "bf16-mixed", 4, 8192, "rowwise", False))),
            ("llama, compiled, fp8", ("llama", ("none", True, "bf16-mixed", 4, 8192, "rowwise", False))),
        ],
        days=5,
    )
)
"""The model, and its checkpointing, whether it is compiled, the precision, the micro-batch, the length, the recipe in fp8, and whether
its step is captured as a CUDA graph.
"""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]], torchtitan_package: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for model, config in CONFIGS.items():
        jobs = {name: job for name, (of, job) in CASES.items() if of == model}
        if jobs:
            found |= run(
                "torchtitan_layers.py", json.dumps(str(torchtitan_package)), json.dumps(config), json.dumps(jobs)
            )
    return found


@pytest.mark.parametrize("name", CASES)
def test_torchtitans_step_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    model, (checkpointing, compiles, precision, batch, length, fp8, captures) = CASES[name]
    row = row_of(
        tmp_path, CONFIGS[model], framework="torchtitan", gpus=2, strategy="zero3", precision=precision, micro_batch_size=batch,
        seq_len=length, activation_checkpointing=checkpointing, compile="layer" if compiles else "none", fp8=fp8,
        cuda_graphs=captures,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
