"""Steps of TRL's GRPOTrainer on simulated GPUs, and their phases, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import taken
from rehearsed_jobs import CONFIG, FSDP2_OPTIONS, FSDP2_SETTINGS, LORA_OPTIONS, LORA_SETTINGS, SETTINGS, predicted

pytestmark = pytest.mark.slow

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
                ("adapters", ({**LORA_SETTINGS, "beta": 0.1}, {**LORA_OPTIONS, "beta": 0.1})),
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


@pytest.mark.parametrize("name", JOBS)
def test_steps_and_phases_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = JOBS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = json.dumps({**SETTINGS, **usual, **settings})
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "grpo", **usual, **options})
    assert row.peak_allocated_bytes == pytest.approx(found["train"], rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    for phase in {"generate", "score"} & set(row.job.phases):
        assert row.job.phases[phase].gpu_bytes + libraries == pytest.approx(found[phase], rel=2e-3)
