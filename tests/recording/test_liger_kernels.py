"""Liger's kernels for norms, positions and feed-forward networks: who gets them, and what they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import taken
from vision_models import config_of, options_of

pytest.importorskip("torch")

from fsdp_advisor import estimate, recommend  # after the check
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.losses import LossCode, loss_code
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.liger import LIGER_KERNELS, LIGER_LOSSES
from fsdp_advisor.strategy_estimate import StrategyEstimate

pytestmark = pytest.mark.slow

CONFIG = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 1000,
}  # fmt: skip


def _row(folder: Path, model: str = "llama", **options: Any) -> StrategyEstimate:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model, **CONFIG}))
    usual = {"gpu": "H100-80GB", "strategy": "ddp", "framework": "trainer", "micro_batch_size": 8, "seq_len": 2048}
    (row,) = estimate(model=str(path), **(usual | options)).estimates  # type: ignore[arg-type]  # several types
    return row


def test_the_kernels_save_memory_and_time_on_a_gpu_alone(tmp_path: Path) -> None:
    loss_alone, kernels = _row(tmp_path, loss="liger"), _row(tmp_path, use_liger_kernel=True)
    assert loss_alone.peak_allocated_bytes is not None and loss_alone.step is not None
    assert kernels.peak_allocated_bytes is not None and kernels.step is not None
    assert kernels.peak_allocated_bytes < 0.9 * loss_alone.peak_allocated_bytes
    assert kernels.step.seconds < 0.9 * loss_alone.step.seconds
    assert kernels.simulated_peak_bytes == loss_alone.simulated_peak_bytes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "liger"),
        ({"loss": "full"}, "full"),
        ({"loss": "cce"}, "cce"),
        ({"framework": "trl"}, "trl"),
        ({"use_liger_kernel": "false"}, "full"),
    ],
)
def test_the_kernels_imply_ligers_loss_where_no_other_is_chosen(options: dict[str, str], expected: LossCode) -> None:
    usual = {"model": "gpt2", "framework": "trainer", "use_liger_kernel": "true"}
    assert loss_code(make_request(usual | options)) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"framework": "torchtitan", "backend": "fsdp2"}, "trains its own"),
        ({"framework": "trl", "task": "dpo"}, "--task dpo"),
    ],
)
def test_jobs_that_are_not_modelled_with_the_kernels_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loss_code(make_request({"model": "gpt2", "use_liger_kernel": "true", **options}))


def test_a_model_that_liger_does_not_know_trains_as_without_it() -> None:
    usual: dict[str, Any] = {"model": "gpt2", "gpu": "H100-80GB", "framework": "trainer"}
    plain, with_liger = (estimate(**usual, strategy="ddp", use_liger_kernel=liger) for liger in (False, True))
    assert with_liger.estimates[0] == plain.estimates[0]
    assert any("Liger 0.8.5 has no kernels for models of type gpt2" in note for note in with_liger.notes)
    assert recommend(**usual, use_liger_kernel=True).recommendation.winner is not None


def test_a_model_of_which_liger_replaces_only_the_loss_of_pytorch_has_no_peak(tmp_path: Path) -> None:
    row = _row(tmp_path, "granite", use_liger_kernel=True)
    assert row.peak_allocated_bytes is None
    assert any("no loss for models of type granite" in text for text in row.not_modelled)


@pytest.mark.parametrize(
    ("model", "said"),
    taken(
        [
            ("qwen2_5_vl", "with transformers 5.23, Liger 0.8.5 cannot import its own code"),
        ],
        [
            ("paligemma", "Liger 0.8.5 fails in its forward"),
            ("llama4", "Liger 0.8.5 fails in its forward"),
            ("qwen3_5", "Liger 0.8.5 fails in its forward"),
            ("gemma4", "Liger's loss is not modelled for models of type gemma4 with images"),
        ],
        days=2,
    ),
)
def test_a_vision_language_model_that_liger_cannot_train_has_no_peak(model: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(model)))
    (row,) = estimate(
        model=str(path), gpu="H100-80GB", strategy="ddp", framework="trainer", seq_len=1024, use_liger_kernel=True,
        **options_of(model),
    ).estimates  # fmt: skip
    assert row.peak_allocated_bytes is None
    assert any(said in text for text in row.not_modelled)


def test_adapters_of_experts_have_no_peak_because_liger_fails(tmp_path: Path) -> None:
    row = _row(tmp_path, "mixtral", use_liger_kernel=True, use_peft=True, lora_target_modules="all-linear")
    assert row.peak_allocated_bytes is None
    assert any("adapters of routed experts" in text for text in row.not_modelled)


def test_an_answer_says_which_figures_have_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    report = estimate(model=str(tmp_path), strategy="ddp", framework="trainer", use_liger_kernel=True, loss="full")
    assert any("simulated_peak_bytes is of transformers' own code" in note for note in report.notes)


def test_liger_has_a_loss_for_each_type_with_kernels() -> None:
    assert LIGER_KERNELS.keys() <= LIGER_LOSSES
