"""The last line of an estimate of which nothing fits without offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.estimator import estimate
from fsdp_advisor.render.view import report_view
from fsdp_advisor.report import Rows
from fsdp_advisor.units import format_gib

SEARCH = "fsdp-advisor recommend, with the same options, searches for the fastest plan that fits."


@pytest.mark.parametrize(
    "options",
    [
        {"model": "gpt2", "strategy": "ddp", "gpu": "H100"},
        {"model": "meta-llama/Llama-2-7b-hf", "strategy": "zero3", "offload": "parameters", "gpu": "rtx4090"},
    ],
)
def test_a_plan_that_fits_as_it_was_asked_for_needs_no_way_out(options: dict[str, Any]) -> None:
    assert report_view(estimate(gpus=1, **options)).way_out == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "ddp"}, "Nothing fits."),
        (
            {"strategy": "zero2"},
            "Nothing fits. Options that save memory, alone or together: --activation-checkpointing full, "
            "--offload parameters (states in the host's memory).",
        ),
        (
            {"strategy": "zero2", "gpu": "DGX-Spark", "model": "meta-llama/Llama-3.1-8B"},
            "Nothing fits. Options that save memory: --activation-checkpointing full.",
        ),
        ({"strategy": "all"}, "Only offload fits."),
    ],
)  # fmt: skip
def test_the_line_names_options_that_the_job_does_not_use(options: dict[str, Any], expected: str) -> None:
    report = estimate(**{"model": "meta-llama/Llama-2-7b-hf", "gpus": 1, "gpu": "rtx4090"} | options)
    assert report_view(report).way_out == f"{expected} {SEARCH}"


@pytest.mark.parametrize(("gpu", "named"), [("4GiB", False), ("8GiB", True)])
def test_a_job_whose_states_alone_are_too_large_names_no_small_savings(gpu: str, named: bool) -> None:
    """QLoRA of Llama-3.1-8B has 7.67 GiB of states."""
    pytest.importorskip("peft")
    report = estimate(model="meta-llama/Llama-3.1-8B", gpu=gpu, use_peft=True, load_in_4bit=True, strategy="ddp")
    line = report_view(report).way_out
    assert line.startswith("Nothing fits.")
    assert ("--use-bnb-nested-quant" in line, "--activation-checkpointing full" in line) == (named, named)


@in_turn(1, of=2)
def test_whole_logits_name_another_loss_and_offload() -> None:
    """A batch of 64 x 2048 tokens: 62.5 GiB for each copy of the logits in bf16 and fp32."""
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100", "strategy": "zero3"}
    report = estimate(**job, micro_batch_size=64, activation_checkpointing="full")
    loss = (report.estimates[0].at_peak or {})["loss"]
    assert loss > 100 * 2**30
    assert report_view(report).way_out == (
        f"Nothing fits. Options that save memory, alone or together: --loss liger or cce (less than the {format_gib(loss)} of whole "
        f"logits), --offload parameters (states in the host's memory). {SEARCH}"
    )
    chunked = estimate(**job, micro_batch_size=64, activation_checkpointing="full", framework="torchtitan", loss="full")
    assert "--loss chunked" in report_view(chunked).way_out


@pytest.mark.slow
def test_lora_on_a_base_in_fp32_names_its_dtype() -> None:
    pytest.importorskip("peft")
    report = estimate(model="meta-llama/Llama-3.1-8B", gpu="rtx4090", use_peft=True, strategy="ddp", dtype="float32")
    assert "--dtype bfloat16 (half the frozen base), --activation-checkpointing full" in report_view(report).way_out


@pytest.mark.slow
def test_a_base_in_4_bits_that_fsdp_keeps_whole_names_the_storage_that_it_shards() -> None:
    report = estimate(
        model="meta-llama/Llama-3.1-70B", gpus=2, gpu="rtx4090", use_peft=True, load_in_4bit=True, strategy="zero3",
        activation_checkpointing="full",
    )  # fmt: skip
    assert "--bnb-4bit-quant-storage bfloat16 (FSDP then shards the base), --use-bnb" in report_view(report).way_out
    assert "--offload parameters" in report_view(report).way_out
    whole = estimate(
        model="meta-llama/Llama-3.1-70B", gpus=2, gpu="rtx4090", use_peft=True, load_in_4bit=True, strategy="ddp"
    )
    assert "Nothing fits" in report_view(whole).way_out and "FSDP then shards" not in report_view(whole).way_out


def test_nothing_is_said_to_fit_or_not_while_a_peak_is_unknown() -> None:
    report = estimate(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="24GiB")
    assert report_view(report).way_out
    unknown = replace(report.estimates[-1], fits=None)
    rows = Rows.of([*report.estimates[:-1], unknown])
    assert not any(row.fits for row in rows) and report_view(replace(report, estimates=rows)).way_out == ""


def test_expandable_segments_are_the_first_option_if_they_make_a_row_fit() -> None:
    job: dict[str, Any] = {
        "model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "gpus": 8, "gpu": "H100", "strategy": "zero3", "seq_len": 4096,
    }  # fmt: skip
    line = report_view(estimate(**job)).way_out
    assert line.startswith(
        "Nothing fits. Options that save memory, alone or together: --allocator-conf expandable_segments:True ("
    )
    assert all(row.fits for row in estimate(**job, allocator_conf="expandable_segments:True").estimates)
    assert "--allocator-conf" not in report_view(estimate(**job | {"gpus": 4})).way_out
