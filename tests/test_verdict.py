"""What is said to be missing is true on every card: no less would do than is said, and the most that is said does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.engines.job_peaks import PhasePeak
from fsdp_advisor.report import Report
from fsdp_advisor.verdict import in_words

GIB = 2**30
SLACK = 0.01
"""Of the last digit shown."""

JOBS: dict[str, dict[str, Any]] = {
    "llama": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4},
    "gpt2": {"model": "openai-community/gpt2-large", "gpus": 2, "micro_batch_size": 4, "seq_len": 1024},
}
CARDS = (8, 16, 24, 32, 40, 48, 50, 56, 64, 72, 80, 96, 141)


def asked(job: dict[str, Any], gib: float, **more: Any) -> Report:
    return estimate(**job, gpu=f"{gib:.3f}GiB", walk="if open", **more)


def missing(words: str) -> tuple[float | None, float | None]:
    """The least and the most GiB that are said to be missing, each None where it is not said."""
    if between := re.fullmatch(r"lacks ([\d.]+)-([\d.]+) GiB", words):
        return float(between[1]), float(between[2])
    least = re.fullmatch(r"lacks ([\d.]+)\+ GiB|states alone lack ([\d.]+) GiB", words)
    most = re.fullmatch(r"lacks up to ([\d.]+) GiB", words)
    return float(least[1] or least[2]) if least else None, float(most[1]) if most else None


@pytest.mark.parametrize("name", JOBS)
def test_what_is_missing_holds_on_every_larger_card(name: str) -> None:
    reports = {gib: asked(JOBS[name], gib) for gib in CARDS}
    said = 0
    for row in range(len(reports[8].estimates)):
        smallest = min((gib for gib, report in reports.items() if report.estimates[row].fits), default=10**6)
        leasts = []
        for gib, report in reports.items():
            least, most = missing(in_words(report, report.estimates[row]))
            if least is not None:
                assert gib + least <= smallest + SLACK
                leasts.append(gib + least)
            if most is not None:
                plan = report.estimates[row].plan
                more = asked(
                    JOBS[name], gib + most + SLACK, strategy=plan.strategy, backend=plan.backend, offload=plan.offload
                )
                assert more.estimates[0].fits
                said += 1
        assert (
            max(leasts, default=0) - min(leasts, default=0) <= 2 * SLACK
        )  # each says the same of the card that it takes
    assert said


def test_what_was_not_walked_is_said_to_be_the_least() -> None:
    job = JOBS["llama"] | {"strategy": "zero3"}
    [row], [walked] = (asked(job, 24, reserved=reserved).estimates for reserved in (False, True))
    report = asked(job, 24)
    assert row.needed_bytes is not None and walked.needed_bytes is not None
    least, most = (f"{(needed - 24 * GIB) / GIB:.2f}" for needed in (row.needed_bytes, walked.needed_bytes))
    assert float(least) < float(most)
    assert (in_words(report, row), in_words(report, walked)) == (f"lacks {least}+ GiB", f"lacks {least}-{most} GiB")


def test_the_most_that_is_missing_is_named() -> None:
    """DDP of a mixture of experts has no recording on a single GPU: loading it lacks less than its states do."""
    report = estimate(model="mistralai/Mixtral-8x7B-v0.1", gpus=8, gpu="H100", strategy="ddp")
    [row] = report.estimates
    assert row.job is not None and row.job.fails == "load"
    lack = row.kept_bytes - report.gpu_memory_bytes
    assert in_words(report, row) == f"states alone lack {lack / GIB:.2f} GiB"


@pytest.mark.parametrize(("gib", "extra", "said"), [(16, -1, "lacks "), (16, 1, "save lacks "), (48, 1, "save lacks ")])
def test_a_phase_that_lacks_more_than_the_step_is_named(gib: int, extra: int, said: str) -> None:
    """Saving takes `extra` GiB more than the step, or than the GPU has where the step fits."""
    report = asked(JOBS["llama"], gib, strategy="zero3", backend="fsdp2")
    [row] = report.estimates
    assert row.job is not None and row.overhead is not None and row.allocated is not None
    step = row.allocated.peak_bytes + row.overhead.middle_bytes
    saving = PhasePeak(gpu_bytes=max(step, gib * GIB) + extra * GIB - row.overhead.low_bytes, host_bytes_per_node=0)
    dying = replace(row, fits=False, job=replace(row.job, phases=dict(row.job.phases) | {"save": saving}, fails="save"))
    assert in_words(report, dying).startswith(said)
