"""Published measurements of training against predictions: the kept results of the campaign, and a sample predicted here."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from published_campaign import NEEDS_EXPLANATION, Result, estimate_of, percentile, read_results
from published_jobs import EXPLAINED, INSTALLED, Mapped, Measurement, Unmapped, mapped, measurements

from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.timing.caveats import MAX_TOKENS

ROWS = {row.id: row for row in measurements()}
RESULTS = read_results()
TARGETS = {"allocated": (0.01, 0.04), "reserved": (0.03, 0.10), "device": (0.06, 0.12), "tokens/s": (0.10, 0.25)}
"""The median and the 90th percentile of absolute errors that predictions may have."""

SAMPLE = ("p0534", "p0535", "p0536", "p0537", "p0806", "p0807", "p0838")
"""Jobs whose peak is in the optimizer's step, where older code makes no difference: the catalog has their tapes."""


def job_of(row: Measurement) -> Mapped:
    job = mapped(row)
    assert isinstance(job, Mapped)
    return replace(job, variant=INSTALLED)


def compared(figure: str) -> list[Result]:
    return [result for result in RESULTS if result.figure == figure and result.error is not None]


@pytest.mark.parametrize("figure", TARGETS)
def test_the_median_error_stays_within_its_target(figure: str) -> None:
    errors = [abs(result.error) for result in compared(figure) if result.error is not None]
    assert len(errors) >= 10
    assert statistics.median(errors) <= TARGETS[figure][0]


@pytest.mark.parametrize("figure", TARGETS)
def test_nine_of_ten_errors_stay_within_their_target(figure: str) -> None:
    errors = [abs(result.error) for result in compared(figure) if result.error is not None]
    assert percentile(errors, 0.9) <= TARGETS[figure][1]


def test_allocated_bytes_are_as_measured_in_every_job() -> None:
    errors = [abs(result.error) for result in compared("allocated") if result.error is not None]
    assert len(errors) >= 39
    assert statistics.median(errors) < 1e-4 and max(errors) < 0.01


def test_jobs_that_ran_out_of_memory_do_not_fit() -> None:
    assert len(compared("out of memory")) > 20
    assert all(result.error == 0 for result in compared("out of memory"))


def test_the_longest_sequences_with_a_speed_are_the_edge_of_the_published_runs() -> None:
    longest = max(job_of(ROWS[result.id]).options["seq_len"] for result in compared("tokens/s"))
    assert longest == MAX_TOKENS


def test_every_row_has_results_or_a_reason() -> None:
    assert {result.id for result in RESULTS} == set(ROWS)
    assert all(result.note for result in RESULTS if result.error is None)


def test_every_large_error_has_a_note_and_every_note_is_used() -> None:
    large = {(r.id, r.figure): r.note for r in RESULTS if r.error is not None and abs(r.error) > NEEDS_EXPLANATION}
    assert large == EXPLAINED


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.id)
def test_every_row_is_a_valid_request_or_has_a_reason(row: Measurement) -> None:
    job = mapped(row)
    if isinstance(job, Unmapped):
        assert job.reason
    else:
        make_request(with_files_read(job.options))


@pytest.mark.parametrize("name", SAMPLE)
def test_allocated_bytes_of_full_fine_tuning_are_as_measured(name: str) -> None:
    found = estimate_of(job_of(ROWS[name]))
    assert found.peak_phase == "optimizer"
    assert found.peak_allocated_bytes == pytest.approx(ROWS[name].measured["allocated_bytes"], rel=1e-4)


@pytest.mark.parametrize("name", ["p0550", "p0551", "p0808", "p0841"])
def test_a_job_that_ran_out_of_memory_is_predicted_not_to_fit(name: str) -> None:
    assert ROWS[name].measured["out_of_memory"]
    assert estimate_of(job_of(ROWS[name])).fits is False


def test_the_readme_says_how_large_the_errors_are() -> None:
    allocated, reserved, speeds = (
        sorted(abs(result.error) for result in compared(figure) if result.error is not None)
        for figure in ("allocated", "reserved", "tokens/s")
    )
    line = (
        f"{len(allocated) + len(reserved)} figures of fine-tuning: median {statistics.median(allocated):.3%} (allocated, at most "
        f"{max(allocated):.1%}) and {statistics.median(reserved):.1%} (reserved, nine of ten within {percentile(reserved, 0.9):.1%}); "
        f"{len(speeds)} speeds: {statistics.median(speeds):.0%}, nine of ten within {percentile(speeds, 0.9):.0%}"
    ).replace("%", " %")
    assert line in " ".join((Path(__file__).parents[2] / "README.md").read_text().split())


def test_sources_are_addresses_of_one_version() -> None:
    assert all(any(part in row.source for part in ("/blob/", "/commit/", "/pull/")) for row in ROWS.values())
    assert len({json.dumps(row.job, sort_keys=True) + row.source for row in ROWS.values()}) == len(ROWS)
