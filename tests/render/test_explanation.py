"""The explanation of a row: its terms, and its timeline, in which repetitions are folded."""

from __future__ import annotations

from fsdp_advisor import estimate
from fsdp_advisor.render.explanation import CAUSES, explanation_view
from fsdp_advisor.render.explanation_text import explanation_text
from fsdp_advisor.render.terminal import Screen
from fsdp_advisor.render.view import report_view
from fsdp_advisor.timing.step import UNCERTAINTY


def explained(**options: object) -> str:
    job = {"model": "openai-community/gpt2", "gpus": 8, "gpu": "H100", "strategy": "zero3", "backend": "deepspeed"}
    report = estimate(**{**job, **options}, explain=True)  # type: ignore[arg-type]
    view = report_view(report)
    return explanation_text(explanation_view(view, view.rows[0], report.estimates[0]), Screen())


def test_every_part_of_the_time_has_a_meaning() -> None:
    assert CAUSES.keys() == UNCERTAINTY.keys()


def test_unknown_host_memory_reads_unknown() -> None:
    text = explained(offload="parameters", offload_device="nvme")
    assert "Host memory per node: unknown" in text and "unknown host memory per node" in text
    assert "Host memory per node: none" in explained()


def test_layers_are_numbered_and_backward_counts_down() -> None:
    lines = [line.split() for line in explained().splitlines() if "GPT2Block" in line]
    numbers = [int(words[words.index(next(w for w in words if "GPT2Block" in w)) + 1]) for words in lines]
    half = len(numbers) // 2
    assert numbers[:half] == sorted(numbers[:half]) and numbers[half:] == sorted(numbers[half:], reverse=True)
    assert (numbers[0], numbers[half - 1], numbers[half], numbers[-1]) == (1, 12, 12, 1)


def test_micro_batches_that_look_the_same_are_shown_once() -> None:
    once, four_times = explained(), explained(gradient_accumulation_steps=4)
    assert "further micro-batch" not in once
    assert four_times.count("the same in each further micro-batch") == 1
    assert four_times.count("end of backward") < 4


def test_the_hint_names_a_row_that_fits_and_one_that_does_not() -> None:
    report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB")
    fits = {e.plan.strategy: e.fits for e in report.estimates if e.plan.offload == "none"}
    assert fits["ddp"] is False and fits["zero3"] is True
    hint = report_view(report).explain_hint
    assert "why DDP does not fit: --explain ddp" in hint
    one = estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB", strategy="ddp")
    assert report_view(one).explain_hint == "For memory at the peak and through the step: --explain ddp"


def test_on_one_gpu_a_plain_training_loop_is_explained_although_another_row_is_faster() -> None:
    view = report_view(estimate(model="Qwen/Qwen3-0.6B", gpus=1, gpu="H100"))
    assert max(view.rows, key=lambda row: row.throughput or 0.0).name == "zero1"
    assert view.explain_hint == "For memory at the peak and through the step: --explain ddp"
    assert "On one GPU, DDP is a plain training loop, and ZeRO shards nothing" in " ".join(view.footnotes)
    assert "1 x H100-80GB (79.19 GiB): " in view.job
