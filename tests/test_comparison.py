"""`compare`: two jobs, and what each difference between them costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.comparison import UNSHARDED, best_row, compare
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.render.check_line import check_result
from fsdp_advisor.render.comparison_text import comparison_text
from fsdp_advisor.render.terminal import Screen
from fsdp_advisor.units import format_gib

BASE = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8, "gpu": "A100-40GB", "strategy": "zero3", "backend": "fsdp2"}
WIDE = Screen(width=300)
CHECKPOINTED = {**BASE, "activation_checkpointing": "full"}


def request(**options: object) -> EstimateRequest:
    return make_request(options)


def test_differences_are_those_of_single_changes_largest_first() -> None:
    a, b = request(**CHECKPOINTED), request(**{**BASE, "micro_batch_size": 4, "gradient_accumulation_steps": 2})
    found = compare(a, b)
    assert found.a.row.fits and found.b.row.fits is False
    by_name = {d.options[0]: d for d in found.differences}
    assert set(by_name) == {"activation_checkpointing", "micro_batch_size", "gradient_accumulation_steps"}
    from fsdp_advisor import estimate

    for name, difference in by_name.items():
        (row,) = estimate(a.but(**{name: getattr(b, name)})).estimates
        assert row.needed_bytes is not None and found.a.row.needed_bytes is not None
        assert difference.needed_bytes == row.needed_bytes - found.a.row.needed_bytes
        assert row.step is not None and found.a.row.step is not None
        ratio = found.a.row.step.tokens_per_second_per_gpu / row.step.tokens_per_second_per_gpu
        assert difference.step_time == pytest.approx(ratio)
        (cured,) = estimate(b.but(**{name: getattr(a, name)})).estimates
        assert difference.cures == cured.fits
    sizes = [
        max(abs(d.needed_bytes or 0) / (found.a.row.needed_bytes or 1), abs((d.step_time or 1) - 1))
        for d in found.differences
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_options_that_only_together_make_the_other_job_fit_are_named() -> None:
    a = request(**CHECKPOINTED, seq_len=16384)
    b = request(**{**BASE, "micro_batch_size": 8, "gpus": 4}, seq_len=16384)
    found = compare(a, b)
    assert found.b.row.fits is False and not any(d.cures for d in found.differences)
    from fsdp_advisor import estimate

    assert "gpus" not in found.cure and len(found.cure) == 2
    assert estimate(b.but(**{name: getattr(a, name) for name in found.cure})).estimates[0].fits
    assert "B fits with A's --activation-checkpointing and --micro-batch-size together." in comparison_text(
        found, WIDE
    ) or ("B fits with A's --micro-batch-size and --activation-checkpointing together." in comparison_text(found, WIDE))


def test_another_gpu_is_the_difference_between_fitting_and_not() -> None:
    found = compare(request(**{**BASE, "gpu": "H100"}), request(**{**BASE, "gpu": "24GiB"}))
    (difference,) = found.differences
    assert (difference.options, difference.a, difference.b, difference.cures) == (
        ("gpu",),
        ("H100-80GB",),
        ("24GiB",),
        True,
    )
    text = comparison_text(found, WIDE)
    assert "A fits H100-80GB" in text and "B does not fit 24GiB" in text and "B fits with A's --gpu." in text


def test_a_difference_that_is_impossible_alone_says_why() -> None:
    found = compare(request(**BASE), request(**{**BASE, "framework": "deepspeed", "backend": "deepspeed"}))
    by_name = {d.options[0]: d for d in found.differences}
    assert by_name["framework"].needed_bytes is None
    assert "framework deepspeed has no backend fsdp2" in (by_name["framework"].reason or "")
    assert "impossible alone" in comparison_text(found, WIDE)
    assert by_name["strategy"].needed_bytes


def test_equal_jobs_have_no_difference() -> None:
    found = compare(request(**BASE), request(**{**BASE, "seq_len": 2048, "gpu": "a100 40gb"}))
    assert found.differences == () and "The two jobs are the same." in comparison_text(found, WIDE)


def test_a_job_without_a_strategy_is_compared_with_one_strategy() -> None:
    found = compare(request(model="openai-community/gpt2", gpus=2, gpu="H100"), request(**BASE))
    assert found.a.request.strategy != "all" and len(found.a.report.estimates) == 1


def test_a_comparison_says_why_a_peak_is_unknown_and_nothing_about_options_not_given() -> None:
    found = compare(*(request(model="7e9", gpus=4, gpu=gpu, strategy="zero3") for gpu in ("H100", "A100-40GB")))
    text = comparison_text(found, WIDE)
    assert "which has 39.39 GiB: peak unknown (a bare parameter count does not tell the sizes of activations" in text
    assert not any("experts" in note for side in (found.a, found.b) for note in side.report.notes)


def test_a_row_that_offloads_is_judged_only_if_no_other_fits() -> None:
    from fsdp_advisor import estimate

    job: dict[str, Any] = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4}
    tight = estimate(**job, gpu="A100-40GB")
    assert any(row.fits and row.offload != "none" for row in tight.estimates)
    assert best_row(tight).offload == "none" and "host memory" not in check_result(tight)["line"]
    offloading = estimate(**job, gpu="24GiB")
    row, found = best_row(offloading), check_result(offloading)
    assert row.fits and row.offload != "none" and found["host_bytes_per_node"] == row.host_bytes_per_node
    assert f" and {format_gib(row.host_bytes_per_node or 0)} of host memory per node, " in found["line"]


SCRIPT = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", dtype="bfloat16")
args = TrainingArguments(per_device_train_batch_size=4, bf16=True, gradient_checkpointing=True)
Trainer(model=model, args=args).train()
"""


@in_turn(0, of=2)
def test_a_trainer_whose_files_name_no_strategy_is_judged_by_ddp(tmp_path: Path) -> None:
    """It fits with DeepSpeed's optimizer offload, which the script does not use."""
    from fsdp_advisor import estimate

    (tmp_path / "train.py").write_text(SCRIPT)
    job: dict[str, Any] = {"config_file": tmp_path / "train.py", "gpu": "rtx4090"}
    report = estimate(**job)
    found = check_result(report)
    assert any(row.fits for row in report.estimates) and found["fits"] is False
    assert "DDP (ddp), 1 x RTX-4090, micro-batch 4, 2048 tokens: " in found["line"] and UNSHARDED in found["notes"]
    assert any("2,048 tokens" in text for text in found["assumed"])
    best = check_result(estimate(**job, strategy="all"))
    assert best["fits"] is True and UNSHARDED not in best["notes"]


@in_turn(1, of=2)
def test_a_comparison_says_that_the_strategies_were_chosen() -> None:
    short, long = ({"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100", "seq_len": n} for n in (4096, 8192))
    found = compare(request(**short), request(**long))
    assert any("A ZeRO-2, B ZeRO-3 + parameter offload" in note for note in found.notes)
    strategies = next(d for d in found.differences if "strategy" in d.options)
    changed = {name for name, x, y in zip(strategies.options, strategies.a, strategies.b, strict=True) if x != y}
    assert changed == {"strategy", "offload"}
    assert not any("no strategy" in note for note in compare(request(**BASE), request(**BASE)).notes)


@in_turn(1, of=2)
def test_one_gpu_is_judged_by_plain_pytorch_if_it_fits() -> None:
    """ZeRO-1 is faster, because it computes everything in bf16."""
    from fsdp_advisor import estimate

    report = estimate(model="Qwen/Qwen3-0.6B", gpu="rtx4090")
    plain, zero1 = report.estimates[:2]
    assert plain.step is not None and zero1.step is not None
    assert zero1.fits and zero1.step.seconds < plain.step.seconds
    assert best_row(report) is plain
    assert best_row(estimate(model="Qwen/Qwen3-1.7B", gpu="rtx4090")).plan.strategy != "ddp"


def test_a_comparison_says_which_job_is_squeezed_into_its_gpu() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "strategy": "zero3"}
    notes = compare(request(**job, gpu="H100"), request(**job, gpu="A100-40GB")).notes
    assert [note[:5] for note in notes if "allocator empties its cache" in note] == ["B fit"]
