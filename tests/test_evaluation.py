"""The Trainer's evaluation: its options, its phase and what it changes in an answer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate, recommend
from fsdp_advisor.engines.evaluation import kept_logits
from fsdp_advisor.errors import UsageError
from fsdp_advisor.model import cache
from fsdp_advisor.render.check_line import check_result
from fsdp_advisor.render.view import report_view
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.verdict import verdict_text

pytestmark = pytest.mark.slow

JOB = {
    "gpu": "H100-80GB",
    "strategy": "ddp",
    "framework": "trainer",
    "precision": "bf16-mixed",
    "seq_len": 256,
    "micro_batch_size": 1,
}


def row(model: str, **options: Any) -> StrategyEstimate:
    (found,) = estimate(**{"model": model, **JOB, "eval_strategy": "epoch", **options}).estimates
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "torch"}, "the evaluation of framework torch is not modelled"),
        (
            {"framework": "trl", "task": "dpo", "compute_metrics": True, "eval_samples": 8},
            "the logits that TRL's evaluation keeps are not modelled with --task dpo",
        ),
        ({"eval_strategy": "no", "compute_metrics": True}, "the job does not evaluate"),
        ({"compute_metrics": True}, "whose size is unknown"),
        (
            {
                "framework": "trl",
                "task": "grpo",
                "max_completion_length": 8,
                "per_device_eval_batch_size": 3,
                "micro_batch_size": 8,
            },
            "micro-batch of evaluation 3 x ranks 1 = 3, not a multiple of --num-generations 8",
        ),
    ],
)
def test_evaluations_that_are_not_modelled_are_refused(options: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(UsageError, match=message):
        row(model, **options)


QWEN: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-7B", "gpus": 4, "gpu": "A100-80GB", "strategy": "zero3", "framework": "trainer",
    "activation_checkpointing": "full", "micro_batch_size": 1, "seq_len": 4096, "eval_strategy": "steps", "per_device_eval_batch_size": 16,
}  # fmt: skip


@in_turn(1, of=2)
def test_steps_that_fit_name_a_smaller_evaluation() -> None:
    report = estimate(**QWEN)
    assert report.estimates[0].only_evaluation_lacks and not report.any_fits
    assert report_view(report).way_out.startswith(
        "The steps fit, but evaluation does not. Options that save memory: --per-device-eval-batch-size (less than 16). "
    )
    assert not estimate(**QWEN | {"gpu": "24GiB"}).estimates[0].only_evaluation_lacks


@in_turn(1, of=4)
def test_a_search_names_the_largest_evaluation_that_fits() -> None:
    job: dict[str, Any] = QWEN | {"offload": "none"}
    remedy, *others = recommend(**job).recommendation.remedies
    size = remedy.options["per_device_eval_batch_size"]
    assert not any("loss" in other.options for other in others)
    fits = {
        n: estimate(**job | {"per_device_eval_batch_size": n, "gpu": "72.82GiB"}).any_fits
        for n in (size, 2 * int(size))
    }
    assert fits == {size: True, 2 * int(size): False}


def test_a_framework_without_evaluation_names_those_that_have_one(model: str) -> None:
    with pytest.raises(UsageError) as refused:
        row(model, framework="torch")
    assert refused.value.hint == "--framework trainer, trl, axolotl or llamafactory has it"


def test_evaluation_is_a_phase_of_the_job(model: str) -> None:
    found, without = row(model), row(model, eval_strategy="no")
    assert found.job_peaks is not None and without.job_peaks is not None
    assert list(found.job_peaks.phases) == ["load", "first_step", "steady_step", "evaluate", "save"]
    assert "evaluate" not in without.job_peaks.phases and without.evaluation is None
    assert found.peak_tensor_bytes == without.peak_tensor_bytes
    assert found.as_dict()["job_peaks"]["evaluate"]["gpu_bytes"] == found.job_peaks.phases["evaluate"].gpu_bytes


@in_turn(1, of=2)
def test_a_large_evaluation_decides_what_is_needed(model: str) -> None:
    small, large = row(model, per_device_eval_batch_size=1), row(model, per_device_eval_batch_size=2048)
    assert small.needed_bytes is not None and large.needed_bytes is not None and large.needed_bytes > small.needed_bytes
    assert large.worst_outside_steps == "evaluate"
    assert large.needed_breakdown is not None and sum(large.needed_breakdown.values()) == large.needed_bytes
    assert large.needed_breakdown["evaluation"] > 0
    report = estimate(**{"model": model, **JOB, "eval_strategy": "steps", "per_device_eval_batch_size": 100_000})
    assert verdict_text(report, report.estimates[0]).startswith("evaluate lacks")


def test_fit_is_unknown_if_the_evaluation_has_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch only the catalog's recordings exist: they have the step, but no forward of an evaluation."""
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    options = {**JOB, "strategy": "zero3", "seq_len": 2048, "gpu": "48GiB", "gpus": 4}
    report = estimate(model="meta-llama/Llama-2-7b-hf", eval_strategy="steps", **options)
    (found,) = report.estimates
    assert found.fits is found.needed_bytes is found.headroom_bytes is None and found.peak_tensor_bytes is not None
    assert found.not_modelled[0].startswith("the peak of evaluation, and whether the job fits")
    assert verdict_text(report, found) == "steps fit, peak of evaluation unknown"
    assert "whether the job fits" in check_result(report)["line"]
    (small,) = estimate(
        model="meta-llama/Llama-2-7b-hf", eval_strategy="steps", **{**options, "gpu": "24GiB"}
    ).estimates
    assert small.fits is False and small.needed_bytes is not None, "the steps alone do not fit"


def test_losses_alone_need_no_more_than_a_forward(model: str) -> None:
    kept = row(model, compute_metrics=True, eval_samples=64)
    assert (
        row(model, compute_metrics=True, eval_samples=64, prediction_loss_only=True).evaluation == row(model).evaluation
    )
    assert kept.evaluation is not None and row(model).evaluation is not None
    assert kept.evaluation.allocated_peak_bytes > row(model).evaluation.allocated_peak_bytes  # type: ignore[union-attr]


def test_logits_are_kept_in_fp32_and_copied_when_they_are_appended(model: str) -> None:
    options = {"eval_strategy": "steps", "compute_metrics": True, "eval_samples": 24}
    found = kept_logits(_profile(model), estimate(**{"model": model, **JOB, **options}).estimates[0].plan)
    batch = 4 * 8 * 256 * 1000  # bytes of the logits of one batch
    assert found.before == (2 * batch, batch)
    assert found.after == (-batch, batch, 3 * batch)
    assert found.peak(forward=0, left=0) == (2 + 1 + 3) * batch


def test_each_of_several_gpus_keeps_the_logits_of_all(model: str) -> None:
    options = {"eval_strategy": "steps", "compute_metrics": True, "eval_samples": 48, "gpus": 2}
    found = kept_logits(_profile(model), estimate(**{"model": model, **JOB, **options}).estimates[0].plan)
    batch = 4 * 8 * 256 * 1000  # bytes of the logits of one batch of a rank
    assert found.before == (4 * batch, 2 * batch)
    assert found.after == (-2 * batch, batch, 2 * batch, -batch, 6 * batch)
    assert found.peak(forward=0, left=0) == (4 + 2 + 6) * batch


@in_turn(2, of=3)
def test_reward_models_evaluate(model: str) -> None:
    found = row(model, framework="trl", task="reward")
    assert found.evaluation is not None and found.job_peaks is not None
    evaluates, saves = found.job_peaks.phases["evaluate"].gpu_bytes, found.job_peaks.phases["save"].gpu_bytes
    assert saves is not None and evaluates is not None
    assert saves < evaluates <= found.evaluation.allocated_peak_bytes, "the optimizer's state stays"


@in_turn(0, of=2)
def test_grpo_evaluates_with_completions_of_its_own(model: str) -> None:
    found = row(model, framework="trl", task="grpo", max_completion_length=8, micro_batch_size=8)
    assert found.evaluation is not None and found.job_peaks is not None
    assert 0 < found.job_peaks.phases["evaluate"].gpu_bytes <= found.evaluation.allocated_peak_bytes


def _profile(model: str) -> Any:
    from fsdp_advisor.model.resolve import resolve

    return resolve(model).profile
