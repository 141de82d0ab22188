"""Which rehearsed jobs are estimated too, by the facts that the script's own objects showed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.rehearsal.inside import job_facts
from fsdp_advisor.rehearsal.prediction import NotRecognized, options_of
from fsdp_advisor.rehearsal.report import RankResult

JOB: dict[str, Any] = {
    "engine": {"backend": "ddp"}, "framework": "trl", "task": {"name": "dpo", "precompute_ref_log_probs": False}, "batch": [4, 128],
    "model": {"class": "LlamaForCausalLM", "config": {}, "attention": "sdpa", "checkpointing": False, "loss": "auto", "peft": None},
    "parameters": 10, "trainable_parameters": 10, "dtypes": ["torch.float32"], "frozen_dtypes": [], "autocast": None,
    "optimizer": {"class": "AdamW", "fused": True},
}  # fmt: skip


def options(folder: Path, **changed: Any) -> dict[str, str]:
    rank = RankResult(
        rank=0, world_size=1, pid=1, status="completed", error=None, steps=3, seconds=1.0, torch="2.13.0", gpu_memory_bytes=1, phases=(),
        out_of_memory=(), timeline=(), job={**JOB, **changed},
    )  # fmt: skip
    return options_of(rank, "H100-80GB", 1, folder)


def test_a_micro_batch_of_dpo_counts_pairs(tmp_path: Path) -> None:
    found = options(tmp_path)
    assert (found["task"], found["framework"], found["micro-batch-size"]) == ("dpo", "trl", "2")


@pytest.mark.parametrize(
    ("model_type", "loss", "framework", "expected"),
    [
        ("llama", "liger", "trainer", ("liger", "true")),
        ("llama", "auto", "trainer", ("full", "true")),
        ("llama", "auto", "trl", ("auto", "true")),
        ("gpt2", "auto", "trainer", ("auto", None)),
    ],
)
def test_ligers_kernels_are_recognized_with_the_loss(
    model_type: str, loss: str, framework: str, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    model = JOB["model"] | {"config": {"model_type": model_type}, "loss": loss, "liger_kernels": True}
    found = options(tmp_path, model=model, framework=framework, task={"name": "sft"})
    assert (found["loss"], found.get("use-liger-kernel")) == expected


def test_a_trainer_of_trl_without_an_estimate_is_not_taken_for_supervised_training(tmp_path: Path) -> None:
    with pytest.raises(NotRecognized, match="GRPOTrainer of TRL"):
        options(tmp_path, task={"name": "GRPOTrainer", "precompute_ref_log_probs": False})


@pytest.mark.parametrize(
    ("name", "module", "task"),
    [("SFTTrainer", "trl.trainer.sft_trainer", "sft"), ("GRPOTrainer", "trl.trainer.grpo_trainer", "GRPOTrainer")],
)
def test_a_trainer_is_known_by_its_class_of_trl(
    name: str, module: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_trl = type(name, (), {"__module__": module})
    trainer = type("OwnTrainer", (of_trl,), {})()
    monkeypatch.setattr(job_facts, "running_trainer", lambda: trainer)
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    assert job_facts.task_of()["name"] == task
    assert job_facts.framework_of() == "trl"
