"""DeepSpeed's section `activation_checkpointing` changes no step of a model of transformers, which DeepSpeed's own code shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import in_turn

from fsdp_advisor.configs import from_texts

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "profile": False},
}  # fmt: skip
SCRIPT = f"""
import json, os
import deepspeed, torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator
from transformers import LlamaConfig, LlamaForCausalLM

settings = {SETTINGS!r}
skip_shm_operator()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
shapes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**shapes)).train()
model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
own, forwards = [], []
apply = checkpointing.CheckpointFunction.apply
checkpointing.CheckpointFunction.apply = lambda *args: (own.append(1), apply(*args))[1]
model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
tokens = torch.zeros(1, 8, dtype=torch.long)

def found():
    own.clear(), forwards.clear()
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()
    read = checkpointing.PARTITION_ACTIVATIONS, checkpointing.CPU_CHECKPOINT
    return {{"read": read, "checkpoints of DeepSpeed": len(own), "forwards of a layer": len(forwards)}}

by_engine = found()
checkpointing.configure(None, deepspeed_config=settings)
print("FOUND", json.dumps([by_engine, found()]), flush=True)
os._exit(0)  # DeepSpeed over gloo sometimes aborts while the interpreter takes it down
"""


@in_turn(3, of=4)
def test_transformers_models_run_no_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "script.py").write_text(SCRIPT)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **rank},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    by_engine, configured = json.loads(line.removeprefix("FOUND "))
    recomputes = {"checkpoints of DeepSpeed": 0, "forwards of a layer": 2}
    assert by_engine == {"read": [False, False], **recomputes}
    assert configured == {"read": [True, True], **recomputes}


def test_the_section_is_read_as_having_no_effect() -> None:
    (reading,) = from_texts({"ds.json": json.dumps(SETTINGS)}).readings
    (said,) = (text for text in reading.assumed if "activation_checkpointing" in text)
    assert "no effect of activation_checkpointing (partition_activations, cpu_checkpointing)" in said
    assert any(key.startswith("activation_checkpointing.cpu_checkpointing") for key in reading.read)
    assert not any("activation_checkpointing" in text for text in (*reading.ignored, *reading.not_modelled))


def test_a_section_that_switches_nothing_on_is_not_mentioned() -> None:
    switched_off = {**SETTINGS, "activation_checkpointing": {"cpu_checkpointing": False}}
    (reading,) = from_texts({"ds.json": json.dumps(switched_off)}).readings
    assert not any("activation_checkpointing" in text for text in reading.assumed)
