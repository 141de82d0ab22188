"""Flagships of 2026 at full size: the prediction equals the kept peaks of PyTorch's own step to the byte, and rehearsals closely."""

from __future__ import annotations

from pathlib import Path

import pytest
from flagships import CASES, FIT_WITH_IMAGE, Line, predicted, read
from matrix import in_turn, of_today

from fsdp_advisor.validation import records
from fsdp_advisor.validation.records import Record

pytest.importorskip("torch")

from repredict import today

LINES = read()
REHEARSED, NOTES = records.read(Path(__file__).with_name("flagships.jsonl"))
LARGEST = {"peak_allocated_bytes": 0.001, "peak_requested_bytes": 0.001, "peak_reserved_bytes": 0.01}
"""Largest accepted error of a rehearsed step, in absolute size."""


def test_every_case_has_kept_peaks() -> None:
    assert [(line.backend, line.model) for line in LINES] == CASES


WITH_IMAGE = [line for line in LINES if line.backend == "ddp" and line.model in FIT_WITH_IMAGE]


@in_turn(4, of=5)
@pytest.mark.parametrize("line", WITH_IMAGE, ids=lambda line: line.model)
def test_prediction_with_an_image_equals_the_simulated_step(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert predicted(line.model, line.backend) == (line.attention, line.phase_peaks)


@pytest.mark.parametrize(
    "line", [one for one in LINES if one not in WITH_IMAGE], ids=lambda line: f"{line.model}-{line.backend}"
)
def test_prediction_equals_the_simulated_step_of_the_whole_model(line: Line) -> None:
    assert predicted(line.model, line.backend) == (line.attention, line.phase_peaks)


def test_twenty_flagships_are_rehearsed_at_full_size() -> None:
    assert not NOTES
    assert len({record.request["model"] for record in REHEARSED if record.outcome == "ok"}) >= 20


@pytest.mark.parametrize("record", REHEARSED, ids=lambda record: record.label)
def test_rehearsed_step_was_predicted(record: Record) -> None:
    assert_predicted(record)


@pytest.mark.slow
@pytest.mark.parametrize("record", of_today(REHEARSED, 12), ids=lambda record: record.label)
def test_prediction_of_a_rehearsed_step_stands(record: Record) -> None:
    assert_predicted(today(record))


def assert_predicted(record: Record) -> None:
    """Assert that the prediction says whether the job fits, and its peaks if it fits."""
    assert record.fits_predicted == record.fits_really
    if record.outcome == "ok":
        assert {name: error for name in LARGEST if abs(error := record.errors[name]) > LARGEST[name]} == {}
