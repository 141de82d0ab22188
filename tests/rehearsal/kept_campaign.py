"""Rehearses the kept campaign: `PYTHONPATH=. REHEARSAL_PYTHON=... python tests/rehearsal/kept_campaign.py`.

The records in `tests/records/without_kernels` were made by `validate --mode rehearse`, whose meter reads PyTorch's counters between
the phases of its own loop. Here the meter of `rehearse`, with its hooks and its history of allocations, measures the same steps. The
results go to kept_campaign.csv in this folder. A case that already has a row is not run again.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from warm_process import Warm

from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.rehearsal.report import RankResult, read_ranks
from fsdp_advisor.validation import records
from fsdp_advisor.validation.on_gpu import COUNTED_STEPS, WARM_UP_STEPS
from fsdp_advisor.validation.records import Record

HERE = Path(__file__).parent
RESULTS = HERE / "kept_campaign.csv"
RECORDS = HERE.parent / "records" / "without_kernels"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: `recorded` by validate, `rehearsed` under the meter of a rehearsal. Bytes are the peaks of the counted steps."""

    gpu: str
    number: int
    case: str
    recorded: str
    rehearsed: str
    recorded_allocated_bytes: int = 0
    rehearsed_allocated_bytes: int = 0
    recorded_reserved_bytes: int = 0
    rehearsed_reserved_bytes: int = 0
    largest_difference_of_a_phase_bytes: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether both runs have the same outcome and the same peaks in every phase."""
        return self.recorded == self.rehearsed and self.largest_difference_of_a_phase_bytes == 0


def cases() -> Iterator[tuple[str, int, Record]]:
    """The GPU, the place in its file, and the record of every kept case."""
    for path in sorted(RECORDS.glob("*.jsonl")):
        made, notes = records.read(path)
        assert not notes, notes
        yield from ((record.versions["gpu"], number, record) for number, record in enumerate(made))


def rehearsed(warm: Warm, gpu: str, number: int, record: Record) -> Row:
    """The row of a case, which runs now in a fork of the warm process."""
    with tempfile.TemporaryDirectory() as folder:
        warm.run("kept_case.py", [str(_job_file(Path(folder), record))], Path(folder))
        (rank,) = read_ranks(Path(folder))
    row = Row(
        gpu=gpu, number=number, case=record.label, recorded=record.outcome,
        rehearsed="oom" if rank.out_of_memory and rank.status == "failed" else "ok",
    )  # fmt: skip
    return row if record.outcome != "ok" else Row(**{**asdict(row), **_peaks(rank, record)})


def _job_file(folder: Path, record: Record) -> Path:
    """The file that kept_case.py reads."""
    given = {name: value for name, value in record.request.items() if name in fields_of(EstimateRequest)}
    request = make_request(given).but(gpu=record.versions["gpu"])
    profile = resolve(request.model).profile
    (plan,) = plans(request, seq_len=request.seq_len or 1)
    assert profile is not None
    job = {
        "name": request.model, "config": dict(profile.config), "task": profile.task, "plan": asdict(plan),
        "folder": str(folder), "runs_out": record.outcome == "oom",
    }  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def _peaks(rank: RankResult, record: Record) -> dict[str, int]:
    counted = range(WARM_UP_STEPS + 1, WARM_UP_STEPS + COUNTED_STEPS["stand-in"] + 1)
    found: dict[str, int] = {}
    differences = []
    for kind in ("allocated", "reserved"):
        peaks = {
            phase: max(
                getattr(each, f"peak_{kind}_bytes")
                for each in rank.phases
                if each.phase == phase and each.step in counted
            )
            for phase in PHASES
        }
        recorded = {phase: int(record.measured["phases"][phase][f"{kind}_bytes"]) for phase in PHASES}
        found[f"rehearsed_{kind}_bytes"] = max(peaks.values())
        found[f"recorded_{kind}_bytes"] = max(recorded.values())
        differences += [abs(peaks[phase] - recorded[phase]) for phase in PHASES]
    return {**found, "largest_difference_of_a_phase_bytes": max(differences)}


def read_rows() -> list[Row]:
    """The results, in the order of the records."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return [
            Row(**{name: int(value) if name.endswith("bytes") or name == "number" else value for name, value in line.items()})
            for line in csv.DictReader(file)
        ]  # fmt: skip


def write_rows(rows: list[Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(rows, key=lambda row: (row.gpu, row.number))))


def main() -> None:
    rows = read_rows()
    kept = {(row.gpu, row.number) for row in rows}
    warm: dict[str, Warm] = {}
    for gpu, number, record in cases():
        if (gpu, number) in kept:
            continue
        if gpu not in warm:
            warm[gpu] = Warm(Path(os.environ["REHEARSAL_PYTHON"]), gpu)
        rows.append(rehearsed(warm[gpu], gpu, number, record))
        print(rows[-1], flush=True)
        write_rows(rows)
    for each in warm.values():
        each.process.communicate()


if __name__ == "__main__":
    main()
