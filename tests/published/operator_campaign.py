"""Rehearses single operators that Liger's repository publishes: `PYTHONPATH=. python tests/published/operator_campaign.py FILE PYTHON`.

FILE has all measurements, PYTHON is that of an environment of rehearsals (CONTRIBUTING.md). The operators run forward and backward on a
simulated GPU, by the code of the installed libraries (`scripts/liger_operators.py`). `operators.csv` in this folder gets the peaks.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment

HERE = Path(__file__).parent
RESULTS = HERE / "operators.csv"
COLUMNS = ("id", "kernel", "provider", "settings", "version", "gpu", "measured_bytes", "rehearsed_bytes", "error")
SOURCE = "linkedin/Liger-Kernel@ead96b61 benchmark/data"
KERNELS = frozenset({"cross_entropy", "geglu", "swiglu", "tiled_geglu", "tiled_swiglu", "rms_norm", "rope"})
"""Operators that occur in a training step that this package models, or in transformers' code."""
GPUS = {
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One operator. `version`: of Liger when it was measured."""

    id: str
    kernel: str
    provider: str
    settings: str
    version: str
    gpu: str
    measured_bytes: int
    rehearsed_bytes: int

    @property
    def error(self) -> float:
        return self.rehearsed_bytes / self.measured_bytes - 1

    def line(self) -> dict[str, Any]:
        return {name: f"{self.error:+.5f}" if name == "error" else getattr(self, name) for name in COLUMNS}


def operators(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of all measurements that `scripts/liger_operators.py` can run."""
    return [row for row in rows if row["source"].startswith(SOURCE) and row["model"].removeprefix("kernel ") in KERNELS]


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    extra = row["extra"]
    return {**json.loads(extra["config"]), extra["x"]: int(extra["x_value"])}


def results_of(rows: Iterable[Mapping[str, Any]], python: Path) -> list[Result]:
    by_gpu: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_gpu[row["gpu"]].append(row)
    peaks: dict[str, int] = {}
    for gpu, here in by_gpu.items():
        asked = [[row["id"], row["model"].removeprefix("kernel "), _provider(row), settings_of(row)] for row in here]
        peaks |= _rehearse(asked, python, GPUS[gpu])
    return [
        Result(
            id=row["id"].replace("new-", "n"),
            kernel=row["model"].removeprefix("kernel "),
            provider=_provider(row),
            settings=json.dumps(settings_of(row)),
            version=row["extra"]["liger_version"],
            gpu=GPUS[row["gpu"]],
            measured_bytes=round(row["measured"]["peak_allocated_gib"] * 2**30),
            rehearsed_bytes=peaks[row["id"]],
        )
        for here in by_gpu.values()
        for row in here
    ]


def _provider(row: Mapping[str, Any]) -> str:
    return str(row["strategy"]).rpartition(" ")[2]


def _rehearse(asked: list[list[Any]], python: Path, gpu: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, HERE / "scripts" / "liger_operators.py", json.dumps(asked)],
            env=environment(python, find_gpu(gpu), 1, outside=os.environ), capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    (found,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return {str(number): int(peak) for number, peak in json.loads(found.removeprefix("FOUND ")).items()}


def read_results(path: Path = RESULTS) -> list[Result]:
    with path.open(newline="") as file:
        return [
            Result(
                **{name: line[name] for name in ("id", "kernel", "provider", "settings", "version", "gpu")},
                measured_bytes=int(line["measured_bytes"]),
                rehearsed_bytes=int(line["rehearsed_bytes"]),
            )
            for line in csv.DictReader(file)
        ]


if __name__ == "__main__":
    made = results_of(operators(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.line() for result in made)
