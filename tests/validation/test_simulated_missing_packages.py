"""Peaks of transformers' own code for linear attention and state-space layers, which runs on a GPU where the packages of kernels are
missing, against PyTorch's engines.

The simulation runs this code on a CPU. In bf16 without autocast, and with eager attention, the step on a GPU has the same tensors, except
for the sums of gradients over tokens, which are in place there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import taken

pytest.importorskip("torch")

from fsdp_advisor.job.compatibility import plans  # after the check
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording import source_of
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

USUAL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = ["linear_attention", "full_attention"] * 2
DELTA = {
    **USUAL, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "head_dim": 16, "layer_types": LINEAR,
}  # fmt: skip
MAMBA = ["mamba", "attention"] * 2
STATES = {
    **USUAL, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32,
}  # fmt: skip
SCAN = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "state_size": 8, "expand": 2, "conv_kernel": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": DELTA,
    "kimi_linear": {
        **USUAL, "num_key_value_heads": 4, "moe_intermediate_size": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2, "model_max_length": 512, "linear_num_heads": 4,
        "linear_head_dim": 32, "layer_types": LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "nemotron_h": {
        **USUAL, "layers_block_type": MAMBA, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 32, "use_bias": False,
    },
    "granitemoehybrid": {
        **STATES, "layer_types": MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64,
    },
    "bamba": {**STATES, "attn_layer_indices": [1, 3]},
    "mamba": SCAN,
    "falcon_mamba": SCAN,
    "rwkv": {
        "vocab_size": 100, "context_length": 512, "hidden_size": 64, "num_hidden_layers": 4, "attention_hidden_size": 64,
        "intermediate_size": 128,
    },
}  # fmt: skip
ENGINES = {
    "fsdp2": {"strategy": "zero3", "backend": "fsdp2"},
    "fsdp1": {"strategy": "zero3", "backend": "fsdp1"},
    "ddp": {"strategy": "ddp"},
}
OVER_TOKENS = ("mamba", "falcon_mamba", "rwkv")
"""Models whose code runs each token in turn, and sums the gradients of what all tokens read. Their step on a CPU is compared."""
CASES = [(model, engine, checkpointing) for checkpointing in ("none", "full") for engine in ENGINES for model in MODELS]


@pytest.mark.parametrize(("model_type", "engine", "checkpointing"), taken(CASES[::7], CASES, days=10))
def test_transformers_own_code_is_predicted(model_type: str, engine: str, checkpointing: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **MODELS[model_type]}))
    options = {"gpus": 4, "precision": "bf16", "attention": "eager", "kernel_packages": "none", "micro_batch_size": 2}
    request = make_request(
        {**options, **ENGINES[engine], "model": str(path), "activation_checkpointing": checkpointing}
    )
    (plan,) = plans(request, seq_len=40)
    model = resolve(request.model)
    assert model.profile is not None
    device = "cpu" if model_type in OVER_TOKENS else "gpu"
    key = replace(tape_key_of(plan, model.profile), device=device, at=plan.tape_shape)
    assert key.without_packages
    simulated = simulate(source_of(model.profile.config, name=model_type, task=model.profile.task), plan)
    assert peak_of_step(model.profile, model.tape(key), plan).phase_peaks == simulated.phase_peaks
