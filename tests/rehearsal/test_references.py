"""Steps of TRL's DPOTrainer, KTOTrainer and RewardTrainer on simulated GPUs, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import (
    CONFIG,
    FSDP2_OPTIONS,
    FSDP2_SETTINGS,
    LORA_OPTIONS,
    LORA_SETTINGS,
    SETTINGS,
    predicted,
    row_of,
)

pytestmark = pytest.mark.slow

CHECKPOINTED = {"activation_checkpointing": "full"}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [
            ("a copy that FSDP2 shards", (FSDP2_SETTINGS, FSDP2_OPTIONS)),
            ("a reward model with adapters, accumulated", (
                {"task": "reward", **LORA_SETTINGS, "gradient_accumulation_steps": 2},
                {"task": "reward", "gradient_accumulation_steps": 2, **LORA_OPTIONS},
            )),
        ],
        [
            ("a copy", ({}, {})),
            ("KTO with a copy", ({"task": "kto"}, {"task": "kto"})),
            ("adapters of a model that FSDP2 shards", ({**LORA_SETTINGS, **FSDP2_SETTINGS}, {**LORA_OPTIONS, **FSDP2_OPTIONS})),
            ("KTO with a copy that FSDP2 shards", ({"task": "kto", **FSDP2_SETTINGS}, {"task": "kto", **FSDP2_OPTIONS})),
            ("adapters that are switched off", (LORA_SETTINGS, LORA_OPTIONS)),
            ("a reward model", ({"task": "reward"}, {"task": "reward"})),
            ("a reward model in half precision", ({"task": "reward", "precision": "bf16"}, {"task": "reward", "precision": "bf16"})),
            ("a reward model, checkpointed", ({"task": "reward", "gradient_checkpointing": True}, {"task": "reward", **CHECKPOINTED})),
            ("a reward model that FSDP2 shards", ({"task": "reward", **FSDP2_SETTINGS}, {"task": "reward", **FSDP2_OPTIONS})),
            ("a copy, checkpointed", ({"gradient_checkpointing": True}, CHECKPOINTED)),
            ("a copy in half precision", ({"precision": "bf16"}, {"precision": "bf16"})),
            ("a copy on every rank", ({"gradient_checkpointing": True}, {"gpus": 2, **CHECKPOINTED})),
            ("adapters, checkpointed", ({**LORA_SETTINGS, "gradient_checkpointing": True}, {**LORA_OPTIONS, **CHECKPOINTED})),
            ("log-probabilities in the batch", ({"precompute_ref_log_probs": True}, {"precompute_ref_log_probs": True})),
            ("KTO whose backward gathers the head again", (
                {"task": "kto", "precompute_ref_log_probs": True, **FSDP2_SETTINGS, "length": 64},
                {"task": "kto", "precompute_ref_log_probs": True, **FSDP2_OPTIONS, "seq_len": 64},
            )),
        ],
        days=2,
    )
)  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""


@in_turn(2, of=3)
@pytest.mark.parametrize("name", JOBS)
def test_steps_need_what_is_predicted(name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path) -> None:
    settings, options = JOBS[name]
    job = json.dumps({**SETTINGS, "task": "dpo", **settings})
    found = run_on_ranks("preferences.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "dpo", **options})
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=1e-3)


CUBLAS_BYTES = 2**20 * 32 + 2**13
"""cuBLAS's workspace on an H100."""


@in_turn(1, of=6)
@pytest.mark.parametrize(
    ("task", "precision"), taken([("dpo", "bf16-mixed")], [("kto", "bf16-mixed"), ("dpo", "bf16")])
)
def test_fsdp2_gathers_the_whole_reference_before_training(
    task: str, precision: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """TRL's script gives no reference model: the trainer loads a copy, computes its log-probabilities and frees it."""
    same = {"task": task, "precision": precision, "precompute_ref_log_probs": True}
    job = {**SETTINGS, **FSDP2_SETTINGS, **same, "length": 16}
    found = run_on_ranks("preferences.py", json.dumps(CONFIG), json.dumps(job), gpus=2)
    row = predicted(tmp_path, seq_len=16, **FSDP2_OPTIONS, **same)
    gathered = row.job_peaks.phases["load"].gpu_bytes
    assert found["before"] == pytest.approx(gathered + CUBLAS_BYTES, rel=0.015)


EXPERTS = {
    **CONFIG, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64,
    "vocab_size": 1000,
}  # fmt: skip


@in_turn(0, of=6)
@pytest.mark.parametrize("weight", taken([0.0], [None]))
def test_the_routers_loss_has_the_trainer_s_weight(
    weight: float | None, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    job = {**SETTINGS, "task": "dpo", "precompute_ref_log_probs": True, "router_aux_loss_coef": weight}
    found = run_on_ranks("preferences.py", json.dumps(EXPERTS), json.dumps(job), gpus=1)
    row = row_of(
        tmp_path, {**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]}, framework="trl", micro_batch_size=2, seq_len=1024,
        task="dpo", precompute_ref_log_probs=True, router_aux_loss_coef=weight,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=1e-3)


OF_LLAMAFACTORY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [("adapters", ({"lora": True}, LORA_OPTIONS))],
        [
            ("KTO", ({"task": "kto", "lora": True}, {"task": "kto", **LORA_OPTIONS})),
            (
                "checkpointed",
                (
                    {
                        "lora": True,
                        "gradient_checkpointing": True,
                        "gradient_checkpointing_kwargs": {"use_reentrant": True},
                    },
                    {"activation_checkpointing": "reentrant", **LORA_OPTIONS},
                ),
            ),
            ("adapters on every rank", ({"lora": True}, {"gpus": 2, **LORA_OPTIONS})),
            ("sharded adapters", ({"lora": True, **FSDP2_SETTINGS}, {**LORA_OPTIONS, **FSDP2_OPTIONS})),
            ("a copy in half precision", ({"precision": "bf16"}, {"precision": "bf16"})),
            ("KTO with a copy", ({"task": "kto", "precision": "bf16"}, {"task": "kto", "precision": "bf16"})),
        ],
        days=2,
    )
)


@in_turn(1, of=3)
@pytest.mark.parametrize("name", OF_LLAMAFACTORY)
def test_llamafactory_s_steps_have_whole_logits(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = OF_LLAMAFACTORY[name]
    job = {**SETTINGS, "task": "dpo", "lora": False, **settings}
    found = run_on_ranks("whole_logits.py", json.dumps(CONFIG), json.dumps(job), gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "dpo", "framework": "llamafactory", **options})
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=1e-3)


EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 64}
EVALUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [("a copy that FSDP2 shards", (FSDP2_SETTINGS, FSDP2_OPTIONS))],
        [
            ("a copy", ({}, {})),
            ("adapters that are switched off", (LORA_SETTINGS, LORA_OPTIONS)),
            ("KTO with a copy", ({"task": "kto"}, {"task": "kto"})),
            ("a reward model", ({"task": "reward"}, {"task": "reward"})),
            (
                "log-probabilities in the batch",
                ({"precompute_ref_log_probs": True}, {"precompute_ref_log_probs": True}),
            ),
        ],
    )
)


@in_turn(0, of=3)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """They are larger than the steps."""
    settings, options = EVALUATIONS[name]
    job = json.dumps({**SETTINGS, "task": "dpo", **EVALUATING, **settings})
    found = run_on_ranks("preferences.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "dpo", "eval_strategy": "steps", "per_device_eval_batch_size": 64, **options})
    assert row.evaluation is not None and found["evaluated"] > found["allocated"]
    assert row.evaluation.allocated_peak_bytes == pytest.approx(found["evaluated"], rel=1e-3)
