"""What is said to be missing is true on every card: no less would do than is said, and the most that is said does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.memory.job import PhasePeak
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
    return estimate(**job, gpu=f"{gib:.3f}GiB", settle=True, **more)


def missing(words: str) -> tuple[float | None, float | None]:
    """The least and the most GiB that are said to be missing, each None where it is not said."""
    found = re.search(r"([\d.]+) to ([\d.]+) GiB more", words)
    if found:
        return float(found[1]), float(found[2])
    least = re.search(r"(?:at least|states alone need|needs) ([\d.]+) GiB more", words)
    most = re.search(r"up to ([\d.]+) GiB more", words)
    return float(least[1]) if least else None, float(most[1]) if most else None


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


def test_what_was_not_walked_is_said_to_be_a_bound() -> None:
    job = JOBS["llama"] | {"strategy": "zero3"}
    words = {gib: in_words(report := asked(job, gib), report.estimates[0]) for gib in (24, 80)}
    assert words[24].startswith("needs at least ")
    assert words[80].startswith("fits, up to ")
    for gib in words:
        [row] = (report := asked(job, gib, reserved=True)).estimates
        assert not re.search("at least|up to", in_words(report, row))


def test_the_most_that_is_missing_is_named() -> None:
    """DDP of a mixture of experts has no recording on a single GPU: loading it lacks less than its states do."""
    report = estimate(model="mistralai/Mixtral-8x7B-v0.1", gpus=8, gpu="H100", strategy="ddp")
    [row] = report.estimates
    assert row.job is not None and row.job.fails == "load"
    lack = row.kept_bytes - report.gpu_memory_bytes
    assert in_words(report, row) == f"states alone need {lack / GIB:.2f} GiB more"


@pytest.mark.parametrize("gib", [16, 48])
def test_a_phase_that_lacks_more_than_the_step_is_named(gib: int) -> None:
    report = asked(JOBS["llama"], gib, strategy="zero3", backend="fsdp2")
    [row] = report.estimates
    assert row.job is not None and row.overhead is not None and row.allocated is not None
    for extra, named in ((-1, "needs "), (1, "save fails: needs at least ")):
        tensors = (
            max(row.allocated.peak_bytes + row.overhead.middle_bytes, gib * GIB) + extra * GIB - row.overhead.low_bytes
        )
        phases = dict(row.job.phases) | {"save": PhasePeak(gpu_bytes=tensors, host_bytes_per_node=0)}
        dying = replace(row, fits=False, job=replace(row.job, phases=phases, fails="save"))
        if gib == 16 or extra > 0:
            assert in_words(report, dying).startswith(named)
            assert in_words(report, dying).endswith(" GiB more")
