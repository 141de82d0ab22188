"""Steps of TRL's GRPOTrainer on simulated GPUs, and their phases, compared with the prediction."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matrix import taken

from fsdp_advisor import estimate
from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "rollouts.py"
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 50_000, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
    },
}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "q_proj,v_proj"}
OLD = {"beta": 0.1, "num_iterations": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a reference and old scores": (OLD, OLD),
    **dict(
        taken(
            [],
            [
                ("no scores", ({}, {})),
                ("half precision, accumulated", ({"precision": "bf16", **ACCUMULATED}, {"precision": "bf16", **ACCUMULATED})),
                ("adapters", ({"lora": True, "beta": 0.1}, {**LORA, "beta": 0.1})),
                (
                    "generated within an update",
                    (
                        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "beta": 0.1},
                        {"activation_checkpointing": "full", "gradient_accumulation_steps": 2, "beta": 0.1},
                    ),
                ),
                ("a copy that FSDP2 shards", ({**OLD, **FSDP2}, {**OLD, "gpus": 2, "strategy": "zero3", "backend": "fsdp2"})),
            ],
        )
    ),
}  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""


@pytest.mark.parametrize("name", JOBS)
def test_steps_and_phases_need_what_is_predicted(name: str, rehearsal_python: Path, tmp_path: Path) -> None:
    settings, options = JOBS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = {"precision": "bf16-mixed", "per_device_train_batch_size": 2, "length": 1024, "gradient_checkpointing": False}
    gpus = options.get("gpus", 1)
    variables = {"REHEARSAL_FOLDER": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [rehearsal_python.parent / "torchrun", f"--nproc-per-node={gpus}", SCRIPT, json.dumps(CONFIG), json.dumps(job | usual | settings)],
        env=environment(rehearsal_python, find_gpu("H100-80GB"), gpus, outside=os.environ | variables),
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    found = [json.loads(text) for text in re.findall(r'\{"rank.*?\}', done.stdout)]
    assert len(found) == gpus, done.stderr[-3000:]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLM"]}))
    estimated = {
        "gpu": "H100-80GB", "strategy": "ddp", "framework": "trl", "task": "grpo", "precision": "bf16-mixed", "micro_batch_size": 2,
        "seq_len": 1024, "activation_checkpointing": "none",
    }  # fmt: skip
    (row,) = estimate(model=str(config), **{**estimated, **usual, **options}).estimates
    assert row.peak_allocated_bytes == pytest.approx(found[0]["train"], rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    for phase in {"generate", "score"} & set(row.job.phases):
        assert row.job.phases[phase].gpu_bytes + libraries == pytest.approx(found[0][phase], rel=2e-3)
