"""The results of a rehearsal, read from the files of its processes and summed up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fsdp_advisor.errors import RehearsalError
from fsdp_advisor.rehearsal.launch import Ended

Outcome = Literal["completed", "out of memory", "failed", "timed out", "interrupted", "nothing measured"]
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")

COMPLETED, OUT_OF_MEMORY, NOT_REHEARSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. A command that fails by itself ends with its own."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The peaks of one phase of one step on one GPU. Step 0 is everything before the first forward."""

    step: int
    phase: str
    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    allocated_bytes_at_end: int
    allocator_retries: int


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An allocation that failed. `frames` are places in the script, innermost first; `snapshot` is a file for `diagnose`.

    `alive`: bytes by category, such as activations, at that moment. `changes`: changes that would free memory, the cheapest first.
    """

    device: int
    requested_bytes: int
    free_bytes: int
    gpu_memory_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    step: int
    phase: str
    frames: tuple[str, ...] = ()
    snapshot: str | None = None
    alive: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The memory use of one rank. `status`: completed, failed, or running if its process was ended from outside."""

    rank: int
    world_size: int
    pid: int
    status: str
    error: str | None
    steps: int
    seconds: float
    torch: str
    gpu_memory_bytes: int
    phases: tuple[PhasePeak, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    timeline: tuple[tuple[int, int], ...]
    job: dict[str, Any] = field(default_factory=dict)
    decisions: tuple[dict[str, Any], ...] = ()
    """The first places where the script read values from the GPU, with the value that they were given."""

    def peak(self, figure: str) -> int:
        """The largest value of one of PEAKS over all phases and GPUs."""
        return max((getattr(phase, figure) for phase in self.phases), default=0)

    @property
    def allocator_retries(self) -> int:
        return max((phase.allocator_retries for phase in self.phases), default=0)

    @property
    def ran_out(self) -> bool:
        """Whether the rank ended with an out-of-memory error. A script may catch one and go on."""
        return bool(self.out_of_memory) and self.status != "completed"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The estimate of the job that the rehearsal recognized. `options` are its command-line options, `figures` its bytes by the names in
    PEAKS. Without an estimate `figures` is empty, and `reason` says why.
    """

    options: Mapping[str, str]
    figures: Mapping[str, int]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rehearsed command. Bytes are those of the worst rank unless said otherwise."""

    command: tuple[str, ...]
    gpu: str
    gpus: int
    nnodes: int
    ranks: tuple[RankResult, ...]
    ended: Ended
    prediction: Prediction | None = None

    @cached_property
    def worst(self) -> RankResult | None:
        """The rank with the highest device memory."""
        return max(self.ranks, key=lambda rank: rank.peak("peak_device_bytes"), default=None)

    @property
    def outcome(self) -> Outcome:
        if any(rank.ran_out for rank in self.ranks):
            return "out of memory"
        if self.ended.interrupted:
            return "interrupted"
        if self.ended.timed_out:
            return "timed out"
        if self.ended.status != 0:
            return "failed"
        return "completed" if self.ranks else "nothing measured"

    @property
    def exit_status(self) -> int:
        """0 completed, 1 out of memory, 2 a failure of the rehearsal, 130 interrupted, otherwise the command's own status."""
        match self.outcome:
            case "completed":
                return COMPLETED
            case "out of memory":
                return OUT_OF_MEMORY
            case "interrupted":
                return INTERRUPTED
            case "failed":
                return self.ended.status
            case "timed out" | "nothing measured":
                return NOT_REHEARSED


def read_ranks(folder: Path) -> tuple[RankResult, ...]:
    """The results of all processes that used memory of a GPU, by rank. Raises RehearsalError for a file that cannot be read.

    A process that only looked at a GPU, such as a compiler's or a checkpoint's worker, is left out if its rank has another.
    """
    results = [_rank(path) for path in sorted(folder.glob("process-*.json"))]
    used = {result.rank for result in results if result.peak("peak_reserved_bytes")}
    kept = [result for result in results if result.rank not in used or result.peak("peak_reserved_bytes")]
    return tuple(sorted(kept, key=lambda result: (result.rank, result.pid)))


def _rank(path: Path) -> RankResult:
    try:
        found = json.loads(path.read_text())
        found["phases"] = tuple(PhasePeak(**phase) for phase in found["phases"])
        found["out_of_memory"] = tuple(
            OutOfMemory(**{**each, "frames": tuple(each["frames"])}) for each in found["out_of_memory"]
        )
        found["timeline"] = tuple((int(at), int(alive)) for at, alive in found["timeline"])
        found["decisions"] = tuple(found.get("decisions", ()))
        return RankResult(**found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RehearsalError(f"{path} cannot be read: {error}", hint="run the rehearsal again") from None
