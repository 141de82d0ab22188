"""Rehearses small jobs on several versions of PyTorch: `PYTHONPATH=. python tests/rehearsal/torch_versions.py PYTHON...`.

Each PYTHON is that of an environment like the one of the tests of rehearsals, with another version of torch and triton. The results go to
torch_versions.csv next to this file. Jobs that have a row for the version there are not rehearsed again.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

from framework_jobs import COMPILED, DEEPSPEED, FSDP2

from fsdp_advisor.rehearsal.build import find_installation
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse

HERE = Path(__file__).parent
RESULTS = HERE / "torch_versions.csv"
LORA = (HERE.parents[1] / "examples" / "lora.py").read_text()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script, and the program of the environment that starts it on as many GPUs. `ranks`: those that run, if not all."""

    text: str
    program: tuple[str, ...]
    gpus: int = 1
    ranks: tuple[int, ...] = ()


TORCHRUN = ("torchrun", "--nproc-per-node", "2")
JOBS = {
    "compiled layer": Job(text=COMPILED, program=("python",)),
    "fsdp2": Job(text=FSDP2, program=TORCHRUN, gpus=2),
    "zero3": Job(text=DEEPSPEED, program=TORCHRUN, gpus=2),
    "peft": Job(text=LORA, program=("accelerate", "launch", "--multi_gpu", "--num_processes", "4"), gpus=4, ranks=(0,)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job on one version. `outcome`: completed, or what went wrong."""

    torch: str
    machine: str
    job: str
    outcome: str
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0


def rehearsed(python: Path, name: str) -> Row:
    job, version = JOBS[name], find_installation(python).torch_version
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(job.text)
        program, *words = job.program
        found = rehearse(
            [str(python.parent / program), *words, str(script)],
            Settings(gpu="A100-80GB", gpus=job.gpus, ranks=job.ranks, empty_weights=True, predict=False, timeout_s=600),
        )
    steps = min((rank.steps for rank in found.ranks), default=0)
    errors = [rank.error for rank in found.ranks if rank.error]
    done = found.outcome == "completed" and steps == 3
    return Row(
        torch=version, machine=platform.machine(), job=name,
        outcome="completed" if done else f"{found.outcome} after {steps} steps: {errors[0] if errors else ''}",
        peak_allocated_bytes=max((rank.peak("peak_allocated_bytes") for rank in found.ranks), default=0),
        peak_reserved_bytes=max((rank.peak("peak_reserved_bytes") for rank in found.ranks), default=0),
    )  # fmt: skip


def read_rows() -> list[Row]:
    """The results, by version and job."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return [
            Row(**{name: int(value) if name.endswith("bytes") else value for name, value in line.items()})
            for line in csv.DictReader(file)
        ]


def write_rows(rows: list[Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(rows, key=lambda row: (row.torch, list(JOBS).index(row.job)))))


def main(pythons: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    versions = {find_installation(Path(python)).torch_version: Path(python) for python in pythons}
    for name, (version, python) in product(JOBS, versions.items()):
        rows = read_rows()
        if not any((row.torch, row.job, row.outcome) == (version, name, "completed") for row in rows):
            new = rehearsed(python, name)
            print(new, flush=True)
            write_rows([*(row for row in rows if (row.torch, row.job) != (version, name)), new])


if __name__ == "__main__":
    main(sys.argv[1:])
