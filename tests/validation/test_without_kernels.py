"""Today's predictions against PyTorch's own CUDA code: records made without kernels (tests/cuda_without_kernels/README.md).

Kernel selection, every allocation and the caching allocator were PyTorch's, so predictions have no measurement's noise to hide in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from fsdp_advisor.estimator import make_request
from fsdp_advisor.hardware.lookup import lookup
from fsdp_advisor.job.request import EstimateRequest, fields_of
from fsdp_advisor.validation import on_gpu, records, report
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.records import Record

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "records" / "without_kernels"
FILES = sorted(FOLDER.glob("*.jsonl"))
MOST = {"peak_allocated_bytes": 0.001, "peak_requested_bytes": 0.001, "peak_reserved_bytes": 0.10}
"""The largest error of a case."""
MEDIAN = {"peak_allocated_bytes": 0.0001, "peak_requested_bytes": 0.0001, "peak_reserved_bytes": 0.0005}


def today(record: Record) -> Record:
    """The record with what is predicted now of a GPU that has done its work whenever the host asks."""
    request = make_request({k: v for k, v in record.request.items() if k in fields_of(EstimateRequest)})
    gpu = lookup(record.versions["gpu"])
    assert gpu is not None
    keeps_up = partial(on_gpu.walked_as_run, gpu_keeps_up=True)
    with mock.patch.object(on_gpu, "walked_as_run", keeps_up):
        found = predict(request, record.rung, "cuda", gpu=gpu)
    phases = found.predicted["phases"].values()
    peaks = {f"peak_{name}": max(phase[name] for phase in phases) for name in ("reserved_bytes", "requested_bytes")}
    return replace(record, predicted={**found.predicted, **peaks}, fits_predicted=found.fits)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_case_comes_out(path: Path) -> None:
    made, notes = records.read(path)
    assert not notes and len(made) >= 60
    now = [today(record) for record in made]
    assert [record.label for record in now if record.fits_predicted != record.fits_really] == []
    far = [
        f"{record.label}: {figure} {record.errors[figure]:+.3%}"
        for record in now
        for figure, most in MOST.items()
        if abs(record.errors.get(figure, 0.0)) > most
    ]
    assert far == []
    for figure, most in MEDIAN.items():
        errors = sorted(abs(record.errors[figure]) for record in now if figure in record.errors)
        assert report.percentile(errors, 50) <= most, figure


def test_there_are_records_of_more_than_one_kind_of_gpu() -> None:
    kinds = {records.read(path)[0][0].versions["compute_capability"] for path in FILES}
    assert {"8.0", "9.0"} <= kinds
