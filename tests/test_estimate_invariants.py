"""Properties of every estimate, over 100 random jobs; 1,000 with `CASES=all`."""

from __future__ import annotations

import pytest
from matrix import taken
from random_jobs import random_jobs

from fsdp_advisor import estimate
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate

JOBS = 1_000
BATCHES = 10


def check_fits(report: Report, row: StrategyEstimate) -> None:
    """Assert that the job fits exactly if it needs no more than the GPU has. The request has no host memory, which would matter too."""
    assert row.needed_bytes is not None and row.headroom_bytes is not None
    assert row.fits is (row.needed_bytes <= report.gpu_memory_bytes)
    assert row.headroom_bytes == report.gpu_memory_bytes - row.needed_bytes
    assert row.headroom_bytes >= 0 or not row.fits


def check_sums(row: StrategyEstimate) -> None:
    """Every breakdown sums to its figure, and no part is negative."""
    assert row.at_peak is not None and row.phase_peaks is not None and row.needed_breakdown is not None
    assert sum(row.at_peak.values()) == row.peak_tensor_bytes == max(row.phase_peaks.values())
    assert sum(row.needed_breakdown.values()) == row.needed_bytes
    assert min(row.needed_breakdown.values()) >= 0


def check_order(row: StrategyEstimate) -> None:
    """Tensors are allocated, allocated memory is reserved, reserved memory is needed."""
    assert row.peak_tensor_bytes is not None and row.peak_allocated_bytes is not None
    assert row.peak_reserved_bytes is not None and row.needed_bytes is not None
    assert row.peak_tensor_bytes <= row.peak_allocated_bytes <= row.peak_reserved_bytes <= row.needed_bytes


@pytest.mark.parametrize("batch", taken([0], range(1, BATCHES)))
def test_estimates_are_consistent(batch: int) -> None:
    checked = 0
    for job in random_jobs(JOBS // BATCHES, seed=batch):
        report = estimate(**job)
        (row,) = report.estimates
        if row.needed_bytes is None:
            assert row.fits is not True and row.not_modelled, job
            continue
        try:
            check_fits(report, row)
            check_sums(row)
            check_order(row)
        except AssertionError as error:
            raise AssertionError(f"{job}: {error}") from error
        checked += 1
    assert checked >= 0.8 * JOBS / BATCHES
