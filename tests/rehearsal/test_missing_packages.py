"""Steps of models on a simulated GPU without the packages of their kernels, compared with the prediction: transformers' own code runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS

pytestmark = in_turn(0, of=5)

USUAL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""The last layer has no attention, and the vocabulary is small, so that the peak is in the code that replaces the kernels."""
DELTA: dict[str, Any] = {
    **USUAL, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 256, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
QWEN35 = {**DELTA, "model_type": "qwen3_5_text", "head_dim": 64}
QWEN3_NEXT = {
    **DELTA, "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
LAYERS = ["mamba", "attention", "mamba"]
NEMOTRON = {
    **USUAL, "model_type": "nemotron_h", "layers_block_type": LAYERS, "head_dim": 64, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "n_groups": 4, "ssm_state_size": 128, "chunk_size": 128, "use_bias": False,
}  # fmt: skip
GRANITE = {
    **USUAL, "model_type": "granitemoehybrid", "layer_types": LAYERS, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_expand": 4,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_chunk_size": 256, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 64,
}  # fmt: skip
BAMBA = {
    **USUAL, "model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_expand": 4,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_chunk_size": 256,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 16, "expand": 4, "conv_kernel": 4,
}  # fmt: skip
FLA = ["fla", "causal_conv1d"]
SSM = ["mamba_ssm", "causal_conv1d"]
JOBS: dict[str, tuple[dict[str, Any], str, int, int, list[str]]] = dict(
    taken(
        [
            ("delta rule, autocast", (QWEN35, "bf16-mixed", 4, 200, FLA)),
            ("Mamba-2, several groups", (NEMOTRON, "bf16-mixed", 2, 300, SSM)),
            ("Mamba-1", (MAMBA, "bf16", 2, 100, SSM)),
        ],
        [
            ("delta rule with experts", (QWEN3_NEXT, "bf16", 4, 256, FLA)),
            ("convolution alone", (QWEN35, "bf16-mixed", 4, 200, ["causal_conv1d"])),
            ("delta rule alone", (QWEN35, "bf16", 4, 200, ["fla"])),
            ("Mamba-2 with a kernel for the convolution", (NEMOTRON, "bf16", 2, 300, ["mamba_ssm"])),
            ("Mamba-2, half precision", (GRANITE, "bf16", 2, 300, SSM)),
            ("Mamba-2 of Bamba", (BAMBA, "bf16-mixed", 2, 300, SSM)),
            ("Mamba-1, with norms, autocast", ({**MAMBA, "model_type": "falcon_mamba"}, "bf16-mixed", 1, 100, SSM)),
        ],
        days=3,
    )
)
"""Configuration, precision, micro-batch, sequence length, missing packages."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("missing_packages.py", json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_transformers_own_code_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, precision, batch, length, missing = JOBS[name]
    installed = {"fla", "causal_conv1d", "mamba_ssm"}.difference(missing)
    row = row_of(
        tmp_path,
        config,
        precision=precision,
        micro_batch_size=batch,
        seq_len=length,
        framework="trainer",
        allocator_conf=EXPANDABLE_SEGMENTS,
        kernel_packages=",".join(sorted(installed)) or "none",
    )
    print(name, row.peak_phase, row.peak_where, row.peak_allocated_bytes, peaks[name])
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-4)
