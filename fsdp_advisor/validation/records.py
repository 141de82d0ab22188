"""Records: one JSON line per run. Imports no torch, so records can be read anywhere.

A record holds the request under the names of the JSON interface, the mode, the outcome, the versions, the measured figures and
the predicted figures. Figures are bytes or seconds; figures that a mode cannot measure are absent.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation.choices import Mode

SCHEMA_VERSION = 2

WITHOUT_KERNELS = "cuda without kernels"
"""`Record.device` of runs of PyTorch's CUDA build on a machine without a GPU (the package `rehearsal`)."""

Outcome = Literal["ok", "oom", "crash", "timeout", "interrupted", "error"]
FINAL: frozenset[Outcome] = frozenset({"ok", "oom", "crash", "timeout"})
"""Outcomes that say something about the case. A campaign runs cases with other outcomes again."""

FIGURES = ("peak_tensor_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
"""The four memory figures, from the smallest to the largest; the largest known one decides whether a job fits."""

_REQUIRED = frozenset({"model", "strategy", "backend", "gpus", "micro_batch_size", "seq_len", "precision"})
"""Keys without which a request has no label."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of one case.

    `request`: the options as resolved. `measured`, `predicted`: figures under the names of the JSON interface. `detail`: other
    facts, such as the sizes in an out-of-memory message or the path of a log. `fits_predicted`, `fits_really`: None if unknown.
    """

    request: dict[str, Any]
    mode: Mode
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
        return case_key(self.request, self.mode, self.device)

    @property
    def errors(self) -> dict[str, float]:
        """Signed relative errors, (predicted - measured) / measured, of all figures that are both predicted and measured.

        Nested figures have dotted names: `phase_peaks.backward`, `phases.backward.reserved_bytes`. Step times count only on GPUs.
        """
        predicted, measured = dict(_flattened(self.predicted)), dict(_flattened(self.measured))
        timed = self.device.startswith("cuda")
        return {
            name: (predicted[name] - value) / value
            for name, value in measured.items()
            if name in predicted and value and (timed or not name.startswith("step_seconds"))
        }

    @property
    def label(self) -> str:
        """The case on one line."""
        r = self.request
        tokens = f" T{r['seq_len']}" if r["seq_len"] else ""
        label = f"{r['model']} {r['strategy']} {r['backend']} x{r['gpus']} B{r['micro_batch_size']}{tokens} {r['precision']}"
        for name, default in (("offload", "none"), ("activation_checkpointing", "none"), ("attention", "sdpa")):
            if r.get(name, default) != default:
                label += f" {name.split('_')[-1]}={r[name]}"
        return label

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values, with its errors."""
        return {**asdict(self), "errors": {k: round(v, 6) for k, v in self.errors.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The record of a JSON object. Ignores unknown keys, which newer versions may add. Raises ValueError if it is not a record."""
        known = {f.name for f in fields(cls)}
        given = {name: value for name, value in _renamed(values).items() if name in known}
        mappings = ("request", "versions", "measured", "predicted", "detail")
        if not all(isinstance(given.get(name, {}), dict) for name in mappings):
            raise ValueError("not a record")
        if given.get("mode") not in get_args(Mode) or given.get("outcome") not in get_args(Outcome):
            raise ValueError("not a record")
        if missing := _REQUIRED - {*given["request"]}:
            raise ValueError(f"its request lacks {', '.join(sorted(missing))}")
        return cls(**given | {"schema_version": SCHEMA_VERSION})


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A record of schema version 1 under today's names: `mode` was `rung`, and `equal_segments` of a snapshot was `alike`."""
    renamed = {"mode" if name == "rung" else name: value for name, value in values.items()}
    match renamed:
        case {"measured": {"snapshot": {"alike": equal, **counts}, **figures}}:
            renamed["measured"] = {**figures, "snapshot": {**counts, "equal_segments": equal}}
    return renamed


def _flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings, with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", number) for inner, number in _flattened(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def case_key(request: Mapping[str, Any], mode: Mode, device: str) -> str:
    """The identity of a case: all options except the GPU, the mode and the kind of device. Versions do not count."""
    options = {k: v for k, v in request.items() if k != "gpu" and v is not None}
    return json.dumps([options, mode, device.split(":")[0]], sort_keys=True, separators=(",", ":"))


def check_writable(path: Path) -> None:
    """Raises UsageError if `append` could not write to the file. Call it before anything runs."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        reason = "it is a directory" if path.is_dir() else "its directory does not exist or is not writable"
        raise UsageError(f"cannot write {path}: {reason}", hint="choose another file for --records")


def append(path: Path, record: Record) -> None:
    """Add one line, whole or not at all, and flush it to the disk.

    Removes a line that a full disk cut short. Ends a line that a power cut left without a newline. Raises UsageError if the file
    cannot be written.
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
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fsync(handle)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="earlier records are intact; run it again to continue"
        ) from error
    finally:
        os.close(handle)


def read(path: Path) -> tuple[list[Record], list[str]]:
    """All records of a file, and a note for each line that is not a record. Raises UsageError if the file cannot be read."""
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
                raise ValueError("not a JSON object")
            records.append(Record.from_dict(values))
        except (ValueError, TypeError, KeyError) as error:
            incomplete = number == len(lines)  # no newline follows it
            reason = (
                "the last line is incomplete, as if writing was interrupted"
                if incomplete
                else f"line {number}: {error}"
            )
            notes.append(f"{path}: {reason}; skipped")
    return records, notes


def downsampled(values: list[int], points: int = 100) -> list[int]:
    """At most `points` values, each the maximum of its part of the list, so that no peak is lost.

    >>> downsampled([1, 5, 2, 3, 4, 4], 3)
    [5, 3, 4]
    """
    if len(values) <= points:
        return values
    edges = [i * len(values) // points for i in range(points + 1)]
    return [max(values[a:b]) for a, b in itertools.pairwise(edges)]
