"""The kept peaks of jobs with other losses, checkpointing, batches and tiled MLPs (step_peaks.csv), and today's predictions of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_peaks import read
from matrix import taken

pytest.importorskip("torch")

from compared_peaks import predicted_peaks
from step_peaks import KINDS, RESULTS, jobs

pytestmark = pytest.mark.slow

KEPT = read(RESULTS)
"""By name of the job."""
JOBS = {name: (kind, case) for name, kind, case in jobs()}
SAMPLE = list(KEPT)[:: max(1, len(KEPT) // 2)]


def test_kept_peaks_are_of_all_kinds_and_eight_architectures_and_agree() -> None:
    found = [JOBS[name] for name in KEPT]
    assert len(found) >= 120
    assert {kind for kind, _ in found} == set(KINDS)
    assert len({case["model"] for _, case in found}) >= 8
    assert sum("use_peft" in case for _, case in found) >= 5
    assert all(line.agrees(JOBS[name][1].get("framework", "torch")) for name, line in KEPT.items())


@pytest.mark.parametrize("name", taken(SAMPLE, [name for name in KEPT if name not in SAMPLE], days=2))
def test_predictions_equal_the_kept_ones(name: str, tmp_path: Path) -> None:
    kind, case = JOBS[name]
    assert predicted_peaks(KINDS[kind][1](case, tmp_path)) == KEPT[name].predicted
