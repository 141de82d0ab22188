"""Today's predictions against every record of a GPU in tests/records, with the tolerances of its README.

Recordings depend on the installed versions, records on those of the GPU's machine. They may differ: the tolerances hold nevertheless.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import of_today, taken

from fsdp_advisor import estimate
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.lookup import lookup
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import takes_newest_first
from fsdp_advisor.model import cache
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.validation import records, report
from fsdp_advisor.validation.choices import Device
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.records import Record

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "records"
LIBRARY_RUNS = list(csv.DictReader((FOLDER / "h200_libraries.csv").open(newline="")))
MODEL_RUNS = list(csv.DictReader((FOLDER / "h200_models.csv").open(newline="")))
LONG_RUNS = [run for run in MODEL_RUNS if '"fp8"' in run["options"] or '"compile": "model"' in run["options"]]
"""Runs whose recording takes more than a minute, or needs torchao."""
TRAINER_RUNS = list(csv.DictReader((FOLDER / "h100_trainers.csv").open(newline="")))
FILES = sorted(FOLDER.glob("*.jsonl"))  # those made without kernels have tighter tolerances, in test_without_kernels.py

STANDARD = {"peak_tensor_bytes": (0.005, 0.005), "peak_allocated_bytes": (0.01, 0.03), "peak_reserved_bytes": (0.05, 0.10)}  # fmt: skip
"""Largest accepted median and largest accepted error of each figure, in absolute size."""


def today(record: Record) -> Record:
    """The record with the present code's prediction in place of the stored one, on the GPU that the record names."""
    request = make_request({k: v for k, v in record.request.items() if k in fields_of(EstimateRequest)})
    newest_first = takes_newest_first(record.versions["torch"])
    device: Device = "cpu" if record.device == "cpu" else "cuda"
    found = predict(request, record.mode, device, gpu=_gpu(record), newest_first=newest_first)
    return replace(record, predicted=found.predicted, fits_predicted=found.fits)


def _gpu(record: Record) -> Gpu | None:
    """The record's GPU, as CUDA described it."""
    if record.device == "cpu":
        return None
    name, capability = record.versions["gpu"], record.versions.get("compute_capability")
    limit = record.detail.get("gpu_memory_bytes", record.measured.get("device_memory_bytes"))
    gpu = lookup(name) or Gpu(
        name=name, full_name=name, memory_bytes=limit, nominal_memory_bytes=limit, memory_source="record", source="record"
    )  # fmt: skip
    major_minor = tuple(map(int, capability.split("."))) if capability else gpu.compute_capability
    return replace(gpu, memory_bytes=limit or gpu.memory_bytes, compute_capability=major_minor)  # type: ignore[arg-type]


def faults(made: Sequence[Record]) -> list[str]:
    """The figures and verdicts of the records that do not meet the standard."""
    found = []
    for spread in report.spreads(made):
        most_median, most = STANDARD.get(spread.figure, (None, None))
        if spread.strategy != "all" or most_median is None or most is None:
            continue
        reported = f"{spread.mode}, {spread.figure} over {spread.cases} cases: "
        if abs(spread.median) > most_median:
            found.append(reported + f"median {spread.median:+.2%}")
        if abs(spread.worst) > most:
            found.append(reported + f"worst {spread.worst:+.2%}")
    wrong = [record for record in made if report.wrong_verdict(record) and not report.near_full(record)]
    return found + [f"wrong verdict: {record.label}" for record in wrong]


def predicted_today(path: Path, days: int = 1) -> list[Record]:
    """Records of a file, all of which are taken within so many days, with today's predictions."""
    made, notes = records.read(path)
    assert not notes, notes
    return [today(record) for record in of_today(report.latest(made), days) if record.outcome in ("ok", "oom")]


@pytest.fixture(scope="module")
def kept() -> dict[str, list[Record]]:
    """A fifth of the kept records of each file, changing from day to day, with today's predictions."""
    return {path.name: predicted_today(path, days=5) for path in FILES}


def faults_today(path: Path) -> list[str]:
    """The faults of today's predictions for all records of a file."""
    return faults(predicted_today(path))


def test_predictions_meet_the_standard_for_every_kept_record(kept: dict[str, list[Record]]) -> None:
    assert {name: faults(found) for name, found in kept.items()} == {name: [] for name in kept}


def test_times_of_kept_records_are_predicted(kept: dict[str, list[Record]]) -> None:
    errors = [abs(e) for found in kept.values() for r in found for name, e in r.errors.items() if name in report.TIMES]
    assert len(errors) >= 15
    assert statistics.median(errors) < 0.06
    assert statistics.quantiles(errors, n=10)[-1] < 0.25


@pytest.mark.parametrize("run", of_today(LIBRARY_RUNS, 8), ids=lambda run: run["options"][:120])
def test_runs_of_other_libraries_are_predicted(run: dict[str, str]) -> None:
    """PEFT, bitsandbytes and Liger on an H200: peaks of the allocator, seconds of a step."""
    options = {"gpus": 1, "gpu": "H200", "strategy": "ddp", **json.loads(run["options"])}
    (row,) = estimate(**options).estimates
    assert row.peak_allocated_bytes == pytest.approx(int(run["allocated_bytes"]), rel=2e-5)
    assert row.peak_reserved_bytes == pytest.approx(int(run["reserved_bytes"]), rel=0.012)
    assert row.step is not None
    assert row.step.seconds == pytest.approx(float(run["step_seconds"]), rel=0.13)


@pytest.mark.parametrize("run", of_today(TRAINER_RUNS, 14), ids=lambda run: run["options"][:120])
def test_runs_of_trainers_are_predicted(run: dict[str, str]) -> None:
    """transformers' Trainer and TRL's on an H100."""
    options = json.loads(run["options"])
    (row,) = estimate(gpu="H100-80GB", **options).estimates
    assert row.peak_allocated_bytes == pytest.approx(int(run["allocated_bytes"]), rel=4e-3)
    assert row.step is not None
    if options.get("task") != "grpo":
        # DPO with adapters waits for the CPU longer than predicted
        assert row.step.seconds == pytest.approx(
            float(run["step_seconds"]), rel=0.15 if options.get("task") == "dpo" else 0.12
        )


@pytest.mark.parametrize(
    "run",
    taken([run for run in MODEL_RUNS if run not in LONG_RUNS], LONG_RUNS, 18),
    ids=lambda run: run["options"][:120],
)
def test_runs_of_recent_models_are_predicted(run: dict[str, str], tmp_path: Path) -> None:
    """Models of 2025 and 2026 on an H200, some with fewer layers; compiled steps, fp8, and TRL's trainers.

    `seconds_within` of a run that is predicted less well has its `cause`; `unpredicted_bytes` are those of the cause.
    """
    options = json.loads(run["options"])
    if "fp8" in options:
        pytest.importorskip("torchao")
    asked = changed_model(options["model"], json.loads(run["changes"]), tmp_path)
    (row,) = estimate(gpu="H200", **options | {"model": asked}).estimates
    unpredicted = int(run["unpredicted_bytes"] or 0)
    # the runs' torch 2.11 takes equal free blocks newest first, today's predictions are for 2.13: up to 0.04 %
    assert row.peak_allocated_bytes + unpredicted == pytest.approx(int(run["allocated_bytes"]), rel=4e-4)
    assert row.step is not None
    within = float(run["seconds_within"] or 0.10)
    assert row.step.seconds == pytest.approx(float(run["step_seconds"]), rel=within)


def test_runs_that_are_predicted_less_well_have_a_cause() -> None:
    for run in MODEL_RUNS:
        assert bool(run["cause"]) == bool(run["seconds_within"] or run["unpredicted_bytes"]), run["options"]


def changed_model(model: str, changes: dict[str, Any], folder: Path) -> str:
    """The model's name, or the path of its configuration with changed values; dots join the keys of nested configurations."""
    if not changes:
        return model
    profile = resolve(model).profile
    assert profile is not None
    config = json.loads(json.dumps(dict(profile.config)))
    for name, value in changes.items():
        *outer, last = name.split(".")
        part = config
        for key in outer:
            part = part[key]
        part[last] = value
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


# The check itself, on synthetic records

GPU = "NVIDIA H100 80GB HBM3"
JOB: dict[str, Any] = {
    "model": "openai-community/gpt2",
    "gpus": 8,
    "strategy": "zero3",
    "seq_len": 1024,
    "gpu": "H100-80GB",
}


def synthetic(micro_batch_size: int, *, allocated: float = 1.0, reserved: float = 1.0, **changes: Any) -> Record:
    """A stand-in's record with multiples of today's predicted figures, and with an old prediction that is far off."""
    gpu = lookup(GPU)
    assert gpu is not None
    found = predict(make_request({**JOB, "micro_batch_size": micro_batch_size}), "stand-in", "cuda", gpu=gpu)
    factors = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "peak_device_bytes": reserved}
    measured = {name: round(found.predicted[name] * factor) for name, factor in factors.items()}
    values: dict[str, Any] = {
        "request": found.request,
        "mode": "stand-in",
        "device": "cuda",
        "outcome": "ok",
        "versions": {**(cache.installed_versions() or {}), "gpu": GPU, "compute_capability": "9.0"},
        "measured": measured,
        "predicted": {"peak_allocated_bytes": 1},
        "fits_predicted": False,
        "fits_really": True,
        "detail": {"gpu_memory_bytes": found.gpu_memory_bytes},
    }
    return Record(**{**values, **changes})


def written(folder: Path, *made: Record) -> Path:
    path = folder / "h100.jsonl"
    for record in made:
        records.append(path, record)
    return path


def test_old_predictions_in_records_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, synthetic(2), synthetic(4, allocated=0.98, reserved=0.91), synthetic(8, allocated=1.001))
    assert faults_today(path) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([{"allocated": 0.96}], "peak_allocated_bytes over 3 cases: worst +4.17%"),
        ([{"allocated": 1.02}, {"allocated": 1.02}, {"allocated": 1.02}], "peak_allocated_bytes over 5 cases: median -"),
        ([{"reserved": 1.15}], "peak_reserved_bytes over 3 cases: worst -13.04%"),
        ([{"reserved": 1.08}, {"reserved": 1.07}, {"reserved": 1.06}], "peak_reserved_bytes over 5 cases: median -"),
        ([{"outcome": "oom", "measured": {}, "fits_really": False}], "wrong verdict: openai-community/gpt2 zero3 fsdp2 x8"),
    ],
    ids=["allocated-worst", "allocated-median", "reserved-worst", "reserved-median", "verdict"],
)  # fmt: skip
def test_predictions_outside_the_standard_are_reported(wrong: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    path = written(tmp_path, synthetic(2), synthetic(4), *(synthetic(8 + n, **one) for n, one in enumerate(wrong)))
    found = faults_today(path)
    assert len(found) == 1 and said in found[0]


def test_records_of_other_versions_are_compared(tmp_path: Path) -> None:
    path = written(
        tmp_path, synthetic(2, allocated=2, versions={"torch": "2.0.0", "transformers": "5.0.0", "gpu": GPU})
    )
    assert [fault.partition(":")[0] for fault in faults_today(path)] == [
        "stand-in, peak_allocated_bytes over 1 cases"
    ] * 2


def test_wrong_verdict_close_to_full_is_accepted(tmp_path: Path) -> None:
    record = synthetic(2)
    needs = today(record).predicted["peak_device_bytes"]
    close = {"gpu_memory_bytes": round(needs * 1.02)}
    failed = replace(record, outcome="oom", measured={}, fits_really=False, detail=close)
    assert faults_today(written(tmp_path, failed)) == []
    far = replace(failed, detail={"gpu_memory_bytes": round(needs * 1.2)})
    assert len(faults([today(far)])) == 1
