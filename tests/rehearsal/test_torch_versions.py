"""The kept results of small jobs on several versions of PyTorch, which `torch_versions.py` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch_versions import JOBS, read_rows

from fsdp_advisor import rehearsal

ROWS = read_rows()
README = Path(rehearsal.__file__).with_name("README.md")


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_readme_names_the_versions_that_ran() -> None:
    (line,) = (line for line in README.read_text().splitlines() if line.startswith("| x86-64 |"))
    assert re.findall(r"2\.\d+", line) == sorted({minor(row.torch) for row in ROWS}, key=lambda v: int(v.split(".")[1]))


@pytest.mark.parametrize("job", JOBS)
def test_every_version_completes_the_job(job: str) -> None:
    ran = {row.torch: row.outcome for row in ROWS if row.job == job}
    assert set(ran) == {row.torch for row in ROWS} and set(ran.values()) == {"completed"}
