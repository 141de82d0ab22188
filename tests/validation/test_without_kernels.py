"""Today's predictions against records of PyTorch's CUDA build without kernels (fsdp_advisor/rehearsal/README.md).

Kernel selection, all allocations and the caching allocator were PyTorch's own, and nothing was measured with noise.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from matrix import ALL

from fsdp_advisor.validation import records

pytest.importorskip("torch")

from repredict import FILES, today

pytestmark = pytest.mark.slow

LARGEST = {"peak_allocated_bytes": 0.001, "peak_requested_bytes": 0.001, "peak_reserved_bytes": 0.10}
"""Largest accepted error of a case, in absolute size."""
MEDIAN = {"peak_allocated_bytes": 0.0001, "peak_requested_bytes": 0.0001, "peak_reserved_bytes": 0.0005}
"""Largest accepted median error."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_predictions_meet_the_tolerances_for_every_case(path: Path) -> None:
    made, notes = records.read(path)
    assert not notes and len(made) >= 60
    made = made if ALL else made[::4]
    now = [today(record) for record in made]
    assert [record.label for record in now if record.fits_predicted != record.fits_really] == []
    far = [
        f"{record.label}: {figure} {record.errors[figure]:+.3%}"
        for record in now
        for figure, most in LARGEST.items()
        if figure in record.errors and abs(record.errors[figure]) > most
    ]
    assert far == []
    stored = [
        (record.predicted[f], after.predicted[f]) for record, after in zip(made, now, strict=True) for f in LARGEST
    ]
    assert all(before == after for before, after in stored), "the page shows the stored predictions: run repredict.py"
    for figure, most in MEDIAN.items():
        errors = [abs(record.errors[figure]) for record in now if figure in record.errors]
        assert len(errors) >= (40 if ALL else 10) and statistics.median(errors) <= most, figure


def test_records_cover_two_compute_capabilities() -> None:
    kinds = {records.read(path)[0][0].versions["compute_capability"] for path in FILES}
    assert {"8.0", "9.0"} <= kinds
