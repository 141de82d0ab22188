"""Steps of TRL's GRPOTrainer on simulated GPUs, and their phases, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import CONFIG, FSDP2_OPTIONS, FSDP2_SETTINGS, LORA_OPTIONS, LORA_SETTINGS, SETTINGS, predicted

from fsdp_advisor.rehearsal.rehearse import Settings, rehearse

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"

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
                (
                    "adapters",
                    (
                        {**LORA_SETTINGS, "beta": 0.1, "per_device_train_batch_size": 4},
                        {**LORA_OPTIONS, "beta": 0.1, "micro_batch_size": 4},
                    ),
                ),
                (
                    "generated within an update",
                    (
                        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "beta": 0.1},
                        {"activation_checkpointing": "full", "gradient_accumulation_steps": 2, "beta": 0.1},
                    ),
                ),
                ("a copy that FSDP2 shards", ({**OLD, **FSDP2_SETTINGS}, {**OLD, **FSDP2_OPTIONS})),
            ],
        )
    ),
}  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""
UNSPLIT = 1 << 20
"""The allocator leaves so much of a large block unused. It counts at the peak of a phase, and at that of the step, whose libraries are
added to a phase. Source: c10/core/CachingDeviceAllocator.h, should_split."""


SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from datasets import Dataset
from training import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

arguments = GRPOConfig(
    max_steps=3, optim="adamw_torch_fused", output_dir="out", report_to="none", save_strategy="no", bf16=True, num_generations=2,
    per_device_train_batch_size=2, max_completion_length=64, beta=0.1, gradient_checkpointing=False, disable_tqdm=True,
)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{CONFIG}), dtype=torch.float32)
import trl.trainer.grpo_trainer
trl.trainer.grpo_trainer.create_model_from_path = lambda *_, **__: AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
GRPOTrainer(
    model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
    train_dataset=Dataset.from_dict({{"prompt": ["a"] * 64}}), processing_class=tokenizer(),
).train()
"""


@in_turn(0, of=2)
@pytest.mark.parametrize("name", JOBS)
def test_steps_and_phases_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = JOBS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = json.dumps({**SETTINGS, **usual, **settings})
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "grpo", **usual, **options})
    assert row.peak_allocated_bytes == pytest.approx(max(found.values()), rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    for phase in {"generate", "score"} & set(row.job.phases):
        predicted_bytes = row.job.phases[phase].gpu_bytes + libraries
        assert predicted_bytes == pytest.approx(found[phase], rel=2e-3, abs=2 * UNSPLIT)


EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 24}
EVALUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [("a reference and old scores", (OLD, OLD))],
        [
            ("no scores, accumulated", (ACCUMULATED, ACCUMULATED)),
            ("adapters", ({**LORA_SETTINGS, "beta": 0.1}, {**LORA_OPTIONS, "beta": 0.1})),
            ("a copy that FSDP2 shards", ({**OLD, **FSDP2_SETTINGS}, {**OLD, **FSDP2_OPTIONS})),
        ],
    )
)


@in_turn(1, of=2)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """They generate and score completions of their own."""
    settings, options = EVALUATIONS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = json.dumps({**SETTINGS, **usual, **EVALUATING, **settings})
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    evaluates = {"eval_strategy": "steps", "per_device_eval_batch_size": EVALUATING["per_device_eval_batch_size"]}
    row = predicted(tmp_path, **{"task": "grpo", **usual, **evaluates, **options})
    assert row.evaluation is not None  # its simulation goes on from the steps'
    assert row.evaluation.allocated_peak_bytes == pytest.approx(max(found["train"], found["evaluate"]), rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    assert row.job.phases["evaluate"].gpu_bytes + libraries == pytest.approx(found["evaluate"], rel=0.01)


@in_turn(1, of=2)
@pytest.mark.usefixtures("predicts_here")
def test_a_script_that_generates_is_recognized_and_predicted(rehearsal_python: Path, tmp_path: Path) -> None:
    """Its prompts, completions and rewards are the trainer's own: generation ends at the maximum length."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = rehearse(
        [str(rehearsal_python), str(tmp_path / "train.py")], Settings(gpu="H100-80GB", gpus=1, steps=2, quiet=True)
    )
    assert found.outcome == "completed" and found.prediction is not None and found.prediction.reason is None
    assert found.prediction.options["task"] == "grpo" and found.prediction.options["seq-len"] == "65"
    predicted, rehearsed = found.prediction.figures["peak_allocated_bytes"], found.ranks[0].peak("peak_allocated_bytes")
    assert predicted == pytest.approx(rehearsed, rel=0.01)
