"""Rehearses published runs and compares allocated bytes.

PYTHONPATH=. python tests/published/rehearsed_campaign.py FAMILY PYTHON [ID ...]

FAMILY is one of RUNS. PYTHON is the interpreter of its environment, which README.md describes. Each result is written to `rehearsed.csv`
next to this file when the run ends. Without IDs only runs without a result are rehearsed, so an interrupted campaign can be continued. A
run takes half a minute on two cores.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_fms import FMS, FmsRun
from published_litgpt import LITGPT, LitgptRun

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse

HERE = Path(__file__).parent
RESULTS = HERE / "rehearsed.csv"
COLUMNS = ("id", "job", "source", "measured_bytes", "rehearsed_bytes", "error", "note")
STEPS = 2

Run = LitgptRun | FmsRun
RUNS: dict[str, tuple[Run, ...]] = {"litgpt": LITGPT, "fms-acceleration": FMS}
ALL = [run for runs in RUNS.values() for run in runs]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `rehearsed_bytes`: None if the rehearsal did not complete; then `note` says why. Otherwise it explains a large error."""

    id: str
    job: str
    source: str
    measured_bytes: int
    rehearsed_bytes: int | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.rehearsed_bytes is None else self.rehearsed_bytes / self.measured_bytes - 1

    def line(self) -> dict[str, Any]:
        error = "" if self.error is None else f"{self.error:+.5f}"
        return {name: error if name == "error" else getattr(self, name) for name in COLUMNS}


def result_of(run: Run, python: Path, note: str) -> Result:
    """Rehearse a run on the GPU that it was measured on. The measurement is the peak of rank 0's whole process."""
    about: dict[str, Any] = {"id": run.id, "job": run.name, "source": run.source, "measured_bytes": run.measured_bytes}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            found = rehearse(
                run.command(python, Path(folder)),
                Settings(
                    gpu=run.gpu, gpus=run.gpus, steps=STEPS, predict=False, random_data=run.random_data, timeout_s=1800
                ),
            )
        except AdvisorError as error:
            return Result(**about, note=f"not rehearsed: {error.message}")
        finally:
            os.chdir(before)
    if found.outcome != "completed":
        errors = [rank.error for rank in found.ranks if rank.error]
        return Result(**about, note=f"{found.outcome}: {errors[0] if errors else ''}")
    return Result(**about, rehearsed_bytes=found.ranks[0].peak("peak_allocated_bytes"), note=note)


def read_results(path: Path = RESULTS) -> list[Result]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Result(
                **{name: line[name] for name in ("id", "job", "source", "note")},
                measured_bytes=int(line["measured_bytes"]),
                rehearsed_bytes=int(line["rehearsed_bytes"]) if line["rehearsed_bytes"] else None,
            )
            for line in csv.DictReader(file)
        ]


def write_results(results: Iterable[Result], path: Path = RESULTS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.line() for result in results)


def main(family: str, python: Path, wanted: list[str]) -> None:
    for run in RUNS[family]:
        kept = {result.id: result for result in read_results()}
        done = run.id in kept and kept[run.id].rehearsed_bytes is not None
        if run.id not in wanted if wanted else done:
            continue
        kept[run.id] = result_of(run, python, kept[run.id].note if run.id in kept else "")
        print(kept[run.id].line(), flush=True)
        write_results(kept[each.id] for each in ALL if each.id in kept)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
