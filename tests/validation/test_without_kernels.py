"""Today's predictions against records of PyTorch's CUDA build without kernels (fsdp_advisor/rehearsal/README.md).

Kernel selection, all allocations and the caching allocator were PyTorch's own, and nothing was measured with noise.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from matrix import of_today

from fsdp_advisor.validation import records

pytest.importorskip("torch")

from repredict import FILES, today

LARGEST = {"peak_allocated_bytes": 0.001, "peak_requested_bytes": 0.001, "peak_reserved_bytes": 0.10}
"""Largest accepted error of a case, in absolute size."""
MEDIAN = {"peak_allocated_bytes": 0.0001, "peak_requested_bytes": 0.0001, "peak_reserved_bytes": 0.0005}
"""Largest accepted median error."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_predictions_meet_the_tolerances_for_every_case(path: Path) -> None:
    made, notes = records.read(path)
    assert not notes and len(made) >= 60
    assert [record.label for record in made if record.fits_predicted != record.fits_really] == []
    far = [
        f"{record.label}: {figure} {record.errors[figure]:+.3%}"
        for record in made
        for figure, most in LARGEST.items()
        if figure in record.errors and abs(record.errors[figure]) > most
    ]
    assert far == []
    for figure, most in MEDIAN.items():
        errors = [abs(record.errors[figure]) for record in made if figure in record.errors]
        assert len(errors) >= 40 and statistics.median(errors) <= most, figure


@pytest.mark.slow
@pytest.mark.parametrize("path", of_today(FILES, 2), ids=lambda path: path.stem)
def test_predictions_are_still_the_stored_ones_that_the_page_shows(path: Path) -> None:
    """If not, `repredict.py` stores them again."""
    made, _ = records.read(path)
    for record in of_today(made, 5):
        now = today(record)
        assert now.fits_predicted == record.fits_predicted, record.label
        assert {f: now.predicted[f] for f in LARGEST} == {f: record.predicted[f] for f in LARGEST}, record.label


def test_records_cover_two_compute_capabilities() -> None:
    kinds = {records.read(path)[0][0].versions["compute_capability"] for path in FILES}
    assert {"8.0", "9.0"} <= kinds
