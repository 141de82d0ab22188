"""Rehearses published runs and compares allocated bytes: `PYTHONPATH=. python tests/published/rehearsed_campaign.py [ID ...]`.

It writes `rehearsed.csv` beside it after each run, and without IDs it rehearses those that have no result there: a campaign that was
interrupted goes on. FMS_PYTHON and LITGPT_PYTHON name the Pythons of the environments in README.md. A job whose environment is not
given keeps its result. On two cores a job takes 10 to 60 seconds.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from published_jobs import Measurement, measurements
from published_litgpt import LITGPT, LitgptRun

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse
from fsdp_advisor.rehearsal.report import RankResult

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RESULTS = HERE / "rehearsed.csv"
COLUMNS = ("id", "job", "source", "measured_bytes", "rehearsed_bytes", "error", "note")
STEPS = 2
FMS_ROWS = (
    *(f"p{n:04}" for n in range(526, 530)), *(f"p{n:04}" for n in range(534, 538)),
    *(f"p{n:04}" for n in range(558, 562)), *(f"p{n:04}" for n in range(602, 606)),
)  # fmt: skip
"""Full fine-tuning, LoRA and QLoRA without fused kernels of two models on one and two GPUs, in packed sequences."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `rehearsed_bytes`: None if the rehearsal did not complete, and `note` says why."""

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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: what was measured, and how to rehearse it in a folder. `peak` reads the same figure off a rank."""

    id: str
    job: str
    source: str
    measured_bytes: int
    python: str | None
    gpu: str
    gpus: int
    command: Callable[[Path], list[str]]
    peak: Callable[[RankResult], int]


def peak_of_training(rank: RankResult) -> int:
    """The peak of the steps, which the Trainer measures from the start of training."""
    return max(phase.peak_allocated_bytes for phase in rank.phases if phase.step)


def peak_of_process(rank: RankResult) -> int:
    return rank.peak("peak_allocated_bytes")


def fms_runs() -> list[Run]:
    python = os.environ.get("FMS_PYTHON")
    return [
        Run(
            id=row.id, job=fms_name(row), source=row.source, measured_bytes=row.measured["allocated_bytes"], python=python,
            gpu="A100-80GB", gpus=row.job["gpus"], command=partial(fms_command, str(python), row), peak=peak_of_training,
        )
        for row in measurements()
        if row.id in FMS_ROWS
    ]  # fmt: skip


def fms_name(row: Measurement) -> str:
    job = row.job
    return f"{job['model'].split('/')[1]} {row.method}, {job['gpus']} x {job['per_device_train_batch_size']} x {job['seq_len']}"


def fms_command(python: str, row: Measurement, folder: Path) -> list[str]:
    write_config(row.job["model"], folder)
    job = json.dumps({**row.job, "method": row.method, "config": "config.json"})
    launcher = [python]
    if row.job["gpus"] > 1:
        launcher = [str(Path(python).with_name("torchrun")), f"--nproc-per-node={row.job['gpus']}"]
    return [*launcher, str(SCRIPTS / "fms_sft.py"), job]


def write_config(model: str, folder: Path) -> None:
    if "santacoder" in model:
        config = json.loads((HERE / "santacoder.json").read_text())
    else:
        profile = resolve(model).profile
        assert profile is not None
        config = {**profile.config, "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def litgpt_runs() -> list[Run]:
    python = os.environ.get("LITGPT_PYTHON")
    return [
        Run(
            id=run.id, job=run.name, source=run.source, measured_bytes=run.measured_bytes, python=python, gpu="A10G", gpus=1,
            command=partial(litgpt_command, str(python), run), peak=peak_of_process,
        )
        for run in LITGPT
    ]  # fmt: skip


def litgpt_command(python: str, run: LitgptRun, folder: Path) -> list[str]:
    return [python, str(SCRIPTS / "litgpt_lora.py"), run.model, *run.words]


def result_of(run: Run, noted: str) -> Result:
    """Rehearse a run. `noted` explains its error, if it is large."""
    about: dict[str, Any] = {"id": run.id, "job": run.job, "source": run.source, "measured_bytes": run.measured_bytes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = Path.cwd()
        os.chdir(folder)
        try:
            settings = Settings(
                gpu=run.gpu, gpus=run.gpus, steps=STEPS, predict=False, random_data=True, timeout_s=900, quiet=False
            )
            found = rehearse(run.command(folder), settings)
        except AdvisorError as error:
            return Result(**about, note=f"not rehearsed: {error.message}")
        finally:
            os.chdir(before)
    if found.outcome != "completed":
        errors = [rank.error for rank in found.ranks if rank.error]
        return Result(**about, note=f"{found.outcome}: {errors[0] if errors else ''}")
    return Result(**about, rehearsed_bytes=run.peak(found.ranks[0]), note=noted)


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


def main(wanted: list[str]) -> None:
    kept = {result.id: result for result in read_results()}
    runs = [*fms_runs(), *litgpt_runs()]
    for run in runs:
        done = run.id in kept and kept[run.id].rehearsed_bytes is not None
        if run.python is None or (run.id not in wanted if wanted else done):
            continue
        kept[run.id] = result_of(run, kept[run.id].note if run.id in kept else "")
        print(kept[run.id].line(), flush=True)
        write_results(kept[run.id] for run in runs if run.id in kept)


if __name__ == "__main__":
    main(sys.argv[1:])
