"""Steps of TRL's DPOTrainer, KTOTrainer and RewardTrainer on simulated GPUs, compared with the prediction."""

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

SCRIPT = Path(__file__).parent / "scripts" / "preferences.py"
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
CHECKPOINTED = {"activation_checkpointing": "full"}
SHARDED = {"gpus": 2, "strategy": "zero3", "backend": "fsdp2"}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a copy that FSDP2 shards": (FSDP2, SHARDED),
    "KTO with a copy": ({"task": "kto"}, {"task": "kto"}),
    "a reward model with adapters, accumulated": (
        {"task": "reward", "lora": True, "gradient_accumulation_steps": 2},
        {"task": "reward", "gradient_accumulation_steps": 2, **LORA},
    ),
    "adapters of a model that FSDP2 shards": ({"lora": True, **FSDP2}, {**LORA, **SHARDED}),
    **dict(
        taken(
            [],
            [
                ("a copy", ({}, {})),
                ("KTO with a copy that FSDP2 shards", ({"task": "kto", **FSDP2}, {"task": "kto", **SHARDED})),
                ("adapters that are switched off", ({"lora": True}, LORA)),
                ("a reward model", ({"task": "reward"}, {"task": "reward"})),
                ("a reward model in half precision", ({"task": "reward", "precision": "bf16"}, {"task": "reward", "precision": "bf16"})),
                ("a reward model, checkpointed", ({"task": "reward", "gradient_checkpointing": True}, {"task": "reward", **CHECKPOINTED})),
                ("a reward model that FSDP2 shards", ({"task": "reward", **FSDP2}, {"task": "reward", **SHARDED})),
                ("a copy, checkpointed", ({"gradient_checkpointing": True}, CHECKPOINTED)),
                ("a copy in half precision", ({"precision": "bf16"}, {"precision": "bf16"})),
                ("a copy on every rank", ({"gradient_checkpointing": True}, {"gpus": 2, **CHECKPOINTED})),
                ("adapters, checkpointed", ({"lora": True, "gradient_checkpointing": True}, {**LORA, **CHECKPOINTED})),
                ("log-probabilities in the batch", ({"precompute_ref_log_probs": True}, {"precompute_ref_log_probs": True})),
            ],
        )
    ),
}  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""


@pytest.mark.parametrize("name", JOBS)
def test_steps_need_what_is_predicted(name: str, rehearsal_python: Path, tmp_path: Path) -> None:
    settings, options = JOBS[name]
    job = {
        "task": "dpo",
        "precision": "bf16-mixed",
        "per_device_train_batch_size": 2,
        "length": 1024,
        "gradient_checkpointing": False,
    }
    gpus = options.get("gpus", 1)
    variables = {"REHEARSAL_FOLDER": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [rehearsal_python.parent / "torchrun", f"--nproc-per-node={gpus}", SCRIPT, json.dumps(CONFIG), json.dumps(job | settings)],
        env=environment(rehearsal_python, find_gpu("H100-80GB"), gpus, outside=os.environ | variables),
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    found = [json.loads(text)["allocated"] for text in re.findall(r'\{"rank.*?\}', done.stdout)]
    assert len(found) == gpus, done.stderr[-3000:]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLM"]}))
    usual = {
        "gpu": "H100-80GB", "strategy": "ddp", "framework": "trl", "task": "dpo", "precision": "bf16-mixed", "micro_batch_size": 2,
        "seq_len": 1024, "activation_checkpointing": "none",
    }  # fmt: skip
    (row,) = estimate(model=str(config), **{**usual, **options}).estimates
    assert row.peak_allocated_bytes == pytest.approx(found[0], rel=1e-3)
