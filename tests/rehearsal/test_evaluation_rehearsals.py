"""The Trainer's own evaluation between training steps, on simulated GPUs, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import CONFIG, FSDP2_OPTIONS, FSDP2_SETTINGS, row_of

pytestmark = in_turn(4, of=5)

SETTINGS = {
    "trainer": "trainer", "precision": "bf16-mixed", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
    "length": 1024, "keeps": False, "batches": 3,
}  # fmt: skip
KEPT = {"compute_metrics": True, "eval_samples": 12}
TRL = {"framework": "trl", "activation_checkpointing": "full"}
SMALL = {"per_device_eval_batch_size": 2}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [
            ("losses alone, sharded by FSDP2", ({"arguments": FSDP2_SETTINGS}, FSDP2_OPTIONS)),
            ("logits of three batches", ({"keeps": True}, KEPT)),
        ],
        [
            ("losses alone", ({}, {})),
            ("logits that two ranks gather", (
                {"keeps": True, **SMALL, "arguments": {"ddp_find_unused_parameters": False}}, {**KEPT, **SMALL, "gpus": 2},
            )),
            ("logits that two ranks of FSDP2 gather", (
                {"keeps": True, **SMALL, "arguments": FSDP2_SETTINGS}, {**KEPT, **SMALL, **FSDP2_OPTIONS},
            )),
            ("losses alone in half precision", ({"precision": "bf16"}, {"precision": "bf16"})),
            ("logits of two batches at a time", (
                {"keeps": True, "batches": 4, "arguments": {"eval_accumulation_steps": 2}},
                {"compute_metrics": True, "eval_accumulation_steps": 2},
            )),
            ("losses alone with DDP", ({"arguments": {"ddp_find_unused_parameters": False}}, {"gpus": 2})),
            ("checkpointed", ({"arguments": {"gradient_checkpointing": True}}, {"activation_checkpointing": "full"})),
            ("Liger's loss", ({"arguments": {"use_liger_kernel": True,
                "liger_kernel_config": {"rope": False, "rms_norm": False, "swiglu": False}}}, {"loss": "liger"})),
            ("TRL", ({"trainer": "trl"}, TRL)),
            ("logits of TRL's second forward", ({"trainer": "trl", "keeps": True}, {**KEPT, **TRL})),
            ("logits of TRL's second forward, sharded by FSDP2", (
                {"trainer": "trl", "keeps": True, **SMALL, "arguments": FSDP2_SETTINGS}, {**KEPT, **SMALL, **FSDP2_OPTIONS, **TRL},
            )),
            ("logits of TRL's second forward in half precision", (
                {"trainer": "trl", "keeps": True, "precision": "bf16"}, {**KEPT, **TRL, "precision": "bf16"},
            )),
        ],
        days=2,
    )
)  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""


@pytest.mark.parametrize("name", JOBS)
def test_evaluation_needs_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = JOBS[name]
    found = run_on_ranks(
        "evaluation.py", json.dumps(CONFIG), json.dumps({**SETTINGS, **settings}), gpus=options.get("gpus", 1)
    )
    row = row_of(
        tmp_path, {**CONFIG, "architectures": ["LlamaForCausalLM"]},
        **{"framework": "trainer", "micro_batch_size": 2, "seq_len": 1024, "eval_strategy": "steps",
            "per_device_eval_batch_size": 4, **options},
    )  # fmt: skip
    assert row.evaluation is not None
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=1e-3)
    assert row.evaluation.allocated_peak_bytes == pytest.approx(max(found["evaluated"], found["allocated"]), rel=1e-3)
