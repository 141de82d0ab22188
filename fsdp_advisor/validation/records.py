"""Records: one JSON line per run, the project's evidence. Imports no torch, so that records can be read anywhere.

A record holds the request in the contract's words, the rung, how the run ended, the versions it ran under, what was measured,
what was predicted, and the signed error of every figure that both know. Figures are bytes (or seconds) under the contract's
names; what a rung cannot measure is absent.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fsdp_advisor.errors import UsageError

SCHEMA_VERSION = 1

WITHOUT_KERNELS = "cuda without kernels"
"""The device of a record for which PyTorch's CUDA build ran without a GPU (tests/cuda_without_kernels)."""

Rung = Literal["simulate", "stand-in", "measure"]
Outcome = Literal["ok", "oom", "crash", "timeout", "interrupted", "error"]
RUNGS: tuple[Rung, ...] = ("simulate", "stand-in", "measure")
OUTCOMES: tuple[Outcome, ...] = ("ok", "oom", "crash", "timeout", "interrupted", "error")
FINAL: frozenset[str] = frozenset({"ok", "oom", "crash", "timeout"})
"""Outcomes that say something of the case; one that was interrupted or never started properly is run again."""

FIGURES = ("peak_tensor_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
"""The four memory figures, in the order of what decides whether a job fits, from weakest to strongest."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of one case.

    `request` are the contract's options as resolved; `measured` and `predicted` figures under the contract's names; `detail`
    whatever else the run told (an out-of-memory's sizes, the log's path). `fits_predicted` and `fits_really` are the verdicts,
    None where nothing known decides.
    """

    request: dict[str, Any]
    rung: Rung
    device: str
    outcome: Outcome
    versions: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    fits_predicted: bool | None = None
    fits_really: bool | None = None
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def key(self) -> str:
        return case_key(self.request, self.rung, self.device)

    @property
    def errors(self) -> dict[str, float]:
        """Signed relative errors, (predicted - measured) / measured, of every figure both sides know.

        Members are named with dots: `phase_peaks.backward`, `phases.backward.reserved_bytes`.
        """
        predicted, measured = dict(_flat(self.predicted)), dict(_flat(self.measured))
        timed = self.device.startswith("cuda")  # a CPU's time says nothing of a GPU's
        return {
            name: (predicted[name] - found) / found
            for name, found in measured.items()
            if name in predicted and found and (timed or not name.startswith("step_seconds"))
        }

    @property
    def label(self) -> str:
        """The case on one line."""
        r = self.request
        what = f"{r['model']} {r['strategy']} {r['backend']} x{r['gpus']}"
        tokens = f" T{r['seq_len']}" if r["seq_len"] else ""
        what += f" B{r['micro_batch_size']}{tokens} {r['precision']}"
        for name, usual in (("offload", "none"), ("activation_checkpointing", "none"), ("attention", "sdpa")):
            if r.get(name, usual) != usual:
                what += f" {name.split('_')[-1]}={r[name]}"
        return what

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "errors": {k: round(v, 6) for k, v in self.errors.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Keys that are unknown are a newer version's and left out. Raises ValueError where values are no record."""
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in values.items() if k in known}
        mappings = all(
            isinstance(given.get(k, {}), dict) for k in ("request", "versions", "measured", "predicted", "detail")
        )
        if not mappings or given.get("rung") not in RUNGS or given.get("outcome") not in OUTCOMES:
            raise ValueError("no record")
        missing = {"model", "strategy", "backend", "gpus", "micro_batch_size", "seq_len", "precision"} - {
            *given["request"]
        }
        if missing:
            raise ValueError(f"its request lacks {', '.join(sorted(missing))}")
        return cls(**given)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", number) for inner, number in _flat(value))
        elif _is_number(value):
            yield name, value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def case_key(request: Mapping[str, Any], rung: str, device: str) -> str:
    """What makes two runs the same case: every option, the rung and the kind of device; not the GPU's name, nor versions."""
    options = {k: v for k, v in request.items() if k != "gpu" and v is not None}
    return json.dumps([options, rung, device.split(":")[0]], sort_keys=True, separators=(",", ":"))


def check(path: Path) -> None:
    """Raises UsageError before anything is run for a file that `append` could not open after."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        why = "it is a directory" if path.is_dir() else "is its directory there, and may you write in it?"
        raise UsageError(f"cannot write {path}: {why}", hint="choose another file for --records")


def append(path: Path, record: Record) -> None:
    """Add one line, whole or not at all, and put it on the disk before returning.

    A line that a full disk cut short is taken off again; a line torn by a power cut is ended, so that ours stands alone.
    Raises UsageError where the file cannot be written.
    """
    line = (json.dumps(record.as_dict(), separators=(",", ":"), allow_nan=False) + "\n").encode()
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="choose another file for --records") from error
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(handle, line)
        if written != len(line):
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(28, "No space left on device")
        os.fsync(handle)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="earlier records are whole; run again to go on after them"
        ) from error
    finally:
        os.close(handle)


def read(path: Path) -> tuple[list[Record], list[str]]:
    """All records of a file, and a note for each line that is none. Raises UsageError where the file cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="name a file that --records has written"
        ) from error
    records, notes = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("no JSON object")
            records.append(Record.from_dict(values))
        except (ValueError, TypeError, KeyError) as error:
            torn = number == len(lines)  # without a newline after it
            why = "the last line is torn, as if its writing was cut short" if torn else f"line {number}: {error}"
            notes.append(f"{path}: {why}; skipped")
    return records, notes


def thinned(highs: list[int], points: int = 100) -> list[int]:
    """At most `points` values, each the highest of its stretch, so that no peak is lost.

    >>> thinned([1, 5, 2, 3, 4, 4], 3)
    [5, 3, 4]
    """
    if len(highs) <= points:
        return highs
    edges = [i * len(highs) // points for i in range(points + 1)]
    return [max(highs[a:b]) for a, b in itertools.pairwise(edges)]
