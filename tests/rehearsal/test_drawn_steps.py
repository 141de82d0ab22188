"""Jobs that were drawn at random and rehearsed, compared with the prediction. Their peaks are kept, so nothing is rehearsed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn_steps import read_jobs
from matrix import of_today
from rehearsed_jobs import row_of

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("job", of_today(read_jobs(), 18), ids=lambda job: job["name"])
def test_drawn_jobs_need_what_is_predicted(job: dict[str, Any], tmp_path: Path) -> None:
    row = row_of(tmp_path, job["config"], **job["options"])
    assert row.peak_allocated_bytes == pytest.approx(job["allocated_bytes"], rel=1e-3)
    if job["evaluated_bytes"]:
        assert row.evaluation is not None
        expected = max(job["evaluated_bytes"], job["allocated_bytes"])
        assert row.evaluation.allocated_peak_bytes == pytest.approx(expected, rel=1e-3)
