"""The verdict's wording: what a job has left or lacks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from matrix import of_today
from refusing import MIXTRAL, refusing_autocast

from fsdp_advisor import estimate, rows
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.memory.allocator import AllocatorResult
from fsdp_advisor.render.check_line import check_result
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib
from fsdp_advisor.verdict import verdict_text

JOBS: dict[str, dict[str, Any]] = {
    "llama": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4},
    "gpt2": {"model": "openai-community/gpt2-large", "gpus": 2, "micro_batch_size": 4, "seq_len": 1024},
}


def one(**options: Any) -> tuple[Report, StrategyEstimate]:
    report = estimate(**options)
    (row,) = report.estimates
    return report, row


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("gib", of_today([8, 24, 40, 80], days=2))
def test_verdict_states_the_headroom(name: str, gib: int) -> None:
    report = estimate(**JOBS[name], gpu=f"{gib}GiB")
    for row in report.estimates:
        assert row.headroom_bytes is not None
        verdict = verdict_text(report, row)
        assert format_gib(abs(row.headroom_bytes)) in verdict
        assert verdict.startswith("fits, ") is (row.fits is True)
        assert ("lacks " in verdict) is (row.fits is False)


def test_a_gpu_larger_by_what_is_lacking_fits() -> None:
    report, row = one(**JOBS["llama"], strategy="zero3", gpu="24GiB")
    (lacking,) = map(float, re.findall(r"lacks ([\d.]+) GiB", verdict_text(report, row)))
    _, larger = one(**JOBS["llama"], strategy="zero3", gpu=f"{24 + lacking + 0.01:.2f}GiB")
    assert larger.fits


def test_the_host_memory_of_offload_to_nvme_is_unknown() -> None:
    job: dict[str, Any] = {
        "model": JOBS["llama"]["model"], "strategy": "zero3", "backend": "deepspeed", "offload": "parameters",
        "offload_device": "nvme", "activation_checkpointing": "full",
    }  # fmt: skip
    _, on_any_host = one(**job, gpu="rtx4090")
    assert on_any_host.fits and on_any_host.host_bytes_per_node is None
    report, row = one(**job, gpu="rtx4090", host_memory="64GiB")
    assert row.fits is None and row.needed_bytes is not None
    assert verdict_text(report, row) == "fits the GPU, host memory unknown"
    assert check_result(report)["line"].startswith("unknown: ")
    _, too_large = one(**job, gpu="4GiB", host_memory="64GiB")
    assert too_large.fits is False


def test_a_check_says_that_the_size_of_a_host_that_the_job_needs_is_unknown() -> None:
    def line(**options: Any) -> str:
        report, row = one(**JOBS["llama"], gpu="H100", strategy="zero3", backend="deepspeed", **options)
        assert row.fits
        return str(check_result(report)["line"])

    unknown = "the host's size is unknown, so only the GPU was compared (--host-memory gives it)"
    assert line(offload="optimizer").endswith(unknown)
    assert unknown not in line(offload="optimizer", host_memory="2TiB")
    assert unknown not in line()


def test_states_that_exceed_the_gpu_are_named_if_the_peak_is_unknown() -> None:
    request = make_request({"model": MIXTRAL, "gpus": 8, "gpu": "H100", "strategy": "ddp"})
    report = estimate_resolved(request, refusing_autocast())
    (row,) = report.estimates
    assert row.overhead is not None and row.needed_bytes is None
    lacking = row.kept_bytes + row.overhead.middle_bytes - report.gpu_memory_bytes
    assert verdict_text(report, row) == f"states alone lack {format_gib(lacking)}"


def test_states_do_not_fit_beside_the_middle_of_what_cuda_and_nccl_take() -> None:
    """`needed_bytes` counts the middle, so a job without a known peak needs at least its states and the middle."""

    def ddp(gpu: str) -> StrategyEstimate:
        request = make_request({"model": MIXTRAL, "gpus": 8, "gpu": gpu, "strategy": "ddp"})
        (row,) = estimate_resolved(request, refusing_autocast()).estimates
        return row

    large = ddp("1000GiB")
    assert large.fits is None and large.overhead is not None and large.fails_in is None
    low, middle = (large.kept_bytes + n for n in (large.overhead.low_bytes, large.overhead.middle_bytes))
    between = ddp(f"{(low + middle) / 2 / 2**30:.3f}GiB")
    assert between.fits is False and between.fails_in is None
    assert ddp(f"{(middle + 2**28) / 2**30:.3f}GiB").fits is None


def test_a_small_host_is_named() -> None:
    report, row = one(**JOBS["llama"], strategy="zero3", offload="parameters", gpu="A100-40GB", host_memory="16GiB")
    assert row.fits is False
    assert verdict_text(report, row).startswith("host lacks ")


def test_allocator_retries_are_named_with_their_cost() -> None:
    report, row = one(**JOBS["llama"], strategy="zero3", gpu="A100-40GB")
    assert row.allocator is not None and row.fits
    retried = replace(row, allocator=replace(row.allocator, retries_per_step=1))
    assert re.search(r"free with 1 allocator retry per step \(about \d+% slower\)", verdict_text(report, retried))
    smooth = replace(row, allocator=replace(row.allocator, retries_per_step=0))
    assert "retr" not in verdict_text(report, smooth)


def test_an_unknown_peak_is_named() -> None:
    report, row = one(model="7e9", gpus=64, strategy="zero3", gpu="H100")
    assert verdict_text(report, row) == "peak unknown"


def test_retries_in_some_steps_are_not_called_zero_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = rows.allocator_result

    def irregular(*args: Any, **options: Any) -> AllocatorResult:
        return replace(simulated(*args, **options), verdict="fits_with_retries", retries_per_step=0)

    monkeypatch.setattr(rows, "allocator_result", irregular)
    _, row = one(**JOBS["gpt2"], strategy="ddp", gpu="H100")
    [warning] = [text for text in row.warnings if "allocates again" in text]
    assert "in some steps" in warning and "per step" not in warning


def test_a_job_that_fits_only_with_little_for_cuda_and_nccl_is_warned_of() -> None:
    job: dict[str, Any] = {"model": "openai-community/gpt2", "gpus": 2, "strategy": "ddp", "micro_batch_size": 8}

    def row(gpu: str) -> StrategyEstimate:
        return estimate(**job, gpu=gpu).estimates[0]

    wide = row("80GiB")
    assert wide.needed_bytes is not None and wide.overhead is not None
    tight = row(f"{wide.needed_bytes + 2**20}B")
    assert tight.fits and tight.headroom_bytes is not None
    assert tight.headroom_bytes < wide.overhead.high_bytes - wide.overhead.middle_bytes
    said = [any("it may not fit: CUDA and NCCL need" in text for text in found.warnings) for found in (wide, tight)]
    assert said == [False, True]
