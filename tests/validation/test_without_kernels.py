"""Today's predictions against records of PyTorch's CUDA build without kernels (tests/cuda_without_kernels/README.md).

Kernel selection, all allocations and the caching allocator were PyTorch's own, and nothing was measured with noise.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_advisor.estimator import make_request
from fsdp_advisor.hardware.lookup import lookup
from fsdp_advisor.job.request import EstimateRequest, fields_of
from fsdp_advisor.validation import records
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.records import Record

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "records" / "without_kernels"
FILES = sorted(FOLDER.glob("*.jsonl"))
LARGEST = {"peak_allocated_bytes": 0.001, "peak_requested_bytes": 0.001, "peak_reserved_bytes": 0.10}
"""Largest accepted error of a case, in absolute size."""
MEDIAN = {"peak_allocated_bytes": 0.0001, "peak_requested_bytes": 0.0001, "peak_reserved_bytes": 0.0005}
"""Largest accepted median error."""


def today(record: Record) -> Record:
    """The record with today's prediction, for a GPU that finishes its work before the host's next allocation."""
    request = make_request({k: v for k, v in record.request.items() if k in fields_of(EstimateRequest)})
    gpu = lookup(record.versions["gpu"])
    assert gpu is not None
    found = predict(request, record.mode, "cuda", gpu=gpu, gpu_keeps_up=True)
    phases = found.predicted["phases"].values()
    peaks = {f"peak_{name}": max(phase[name] for phase in phases) for name in ("reserved_bytes", "requested_bytes")}
    return replace(record, predicted={**found.predicted, **peaks}, fits_predicted=found.fits)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_predictions_meet_the_tolerances_for_every_case(path: Path) -> None:
    made, notes = records.read(path)
    assert not notes and len(made) >= 60
    now = [today(record) for record in made]
    assert [record.label for record in now if record.fits_predicted != record.fits_really] == []
    far = [
        f"{record.label}: {figure} {record.errors[figure]:+.3%}"
        for record in now
        for figure, most in LARGEST.items()
        if figure in record.errors and abs(record.errors[figure]) > most
    ]
    assert far == []
    for figure, most in MEDIAN.items():
        errors = [abs(record.errors[figure]) for record in now if figure in record.errors]
        assert len(errors) >= 40 and statistics.median(errors) <= most, figure


def test_records_cover_two_compute_capabilities() -> None:
    kinds = {records.read(path)[0][0].versions["compute_capability"] for path in FILES}
    assert {"8.0", "9.0"} <= kinds
