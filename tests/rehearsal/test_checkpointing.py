"""Steps with the checkpointing policies of torchtitan, TRL and transformers on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(0, of=5)

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
JOBS = dict(
    taken(
        [
            ("torchtitan", ("torchtitan", "bf16-mixed", "sdpa", 4, 2048)),
            ("TRL's offload", ("trl:offload", "bf16-mixed", "sdpa", 4, 2048)),
            ("reentrant", ("transformers:reentrant", "bf16-mixed", "sdpa", 4, 2048)),
            ("transformers, inputs on the host", ("transformers:offload", "bf16-mixed", "sdpa", 4, 2048)),
        ],
        [
            ("torchtitan in fp32", ("torchtitan", "fp32", "sdpa", 2, 1000)),
            ("TRL's offload with checkpointing", ("trl:offload+full", "bf16-mixed", "sdpa", 4, 2048)),
            ("TRL's offload in half precision", ("trl:offload", "bf16", "sdpa", 3, 2000)),
            ("saved tensors on the host", ("torch:saved", "bf16", "sdpa", 4, 2048)),
            ("saved tensors on the host, autocast", ("torch:saved", "bf16-mixed", "sdpa", 3, 1000)),
            ("reentrant in half precision", ("transformers:reentrant", "bf16", "sdpa", 3, 2000)),
            ("trl", ("trl:selective", "bf16-mixed", "sdpa", 4, 2048)),
            ("transformers, every second layer", ("transformers:2", "bf16", "sdpa", 3, 2000)),
        ],
        days=2,
    )
)
"""Policy, precision, attention, micro-batch, sequence length."""

OPTIONS: dict[str, dict[str, Any]] = {
    "torchtitan": {"activation_checkpointing": "selective"},
    "trl:selective": {"activation_checkpointing": "selective"},
    "transformers:2": {"activation_checkpointing": "every-2"},
    "transformers:reentrant": {"activation_checkpointing": "reentrant"},
    "transformers:offload": {"activation_checkpointing": "full", "activation_offload": True},
    "trl:offload": {"activation_offload": True},
    "trl:offload+full": {"activation_checkpointing": "full", "activation_offload": True},
    "torch:saved": {"activation_offload": True},
}
"""The options of an estimate, by policy."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("checkpointing.py", json.dumps(CONFIG), json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_the_policy_of_the_library_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    policy, precision, attention, batch, length = JOBS[name]
    by = policy.partition(":")[0]
    row = row_of(
        tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]}, precision=precision, micro_batch_size=batch, seq_len=length,
        attention=attention, framework={"trl": "trl", "torch": "torch"}.get(by, "trainer"), **OPTIONS[policy],
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)


def test_checkpoints_that_accelerate_keeps_on_the_host_need_what_is_predicted(
    run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    found = run_on_ranks("accelerate_offload.py", json.dumps(CONFIG), "4", "2048", gpus=2)
    row = row_of(
        tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]}, precision="bf16-mixed", micro_batch_size=4, seq_len=2048,
        framework="accelerate", gpus=2, strategy="zero3", backend="fsdp2", activation_checkpointing="full", activation_offload=True,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=1e-3)
