"""Random jobs with adapters, other optimizers and DeepSpeed: their predictions against the peaks that rehearsals have left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn_adapters import allocated, differences, name_of, predicted, read
from matrix import taken

pytest.importorskip("torch")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow

JOBS = read()
ZERO3 = [job for job in JOBS if (job["options"]["strategy"], job["options"].get("backend")) == ("zero3", "deepspeed")]
OTHERS = [job for job in JOBS if job not in ZERO3]
LARGEST_DIFFERENCE = 8192


def test_kept_jobs_cover_engines_optimizers_and_architectures() -> None:
    assert len(JOBS) >= 20 and len({job["model"] for job in JOBS}) >= 12
    assert len({job["options"]["optim"] for job in JOBS}) >= 15
    deepspeed = {job["options"]["strategy"] for job in JOBS if job["options"].get("backend") == "deepspeed"}
    assert deepspeed == {"zero1", "zero2", "zero3"}
    assert all(abs(n_bytes) <= LARGEST_DIFFERENCE for job in JOBS for n_bytes in job["difference"].values())


@pytest.mark.parametrize("job", [*taken(ZERO3, [], days=6), *taken(OTHERS, [], days=20)], ids=name_of)
def test_predictions_differ_from_rehearsals_as_known(job: dict[str, Any], tmp_path: Path) -> None:
    found = allocated(predicted(job, tmp_path).predicted["phases"])
    assert differences(found, job["rehearsed"]) == job["difference"]
