"""The types of a diagnosis. Bytes are `int`; None means unknown, with a reason in `unknown`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_advisor.diagnosis.snapshot import Frame
from fsdp_advisor.json_fields import JsonFields, json_fields
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import ACCOUNTS
from fsdp_advisor.report import Printable

SCHEMA_VERSION = 1
Source = Literal["error", "snapshot"]
MomentPhase = Literal["loading", "forward", "loss", "backward", "optimizer", "unknown"]
Category = str
"""A key of CATEGORIES."""

CATEGORIES: Mapping[Category, str] = {
    **ACCOUNTS,
    "libraries": NON_TENSOR_PARTS["libraries"],
    "allocated": "allocated by PyTorch; an error message does not say for what",
    "unattributed": "allocated, but the snapshot does not say by what",
    "private_pools": "allocated in private pools, such as those of CUDA graphs",
    "fragmentation": "reserved by PyTorch's allocator, in no tensor",
    "cuda_and_nccl": "CUDA context, kernels, NCCL's buffers",
    "outside": "outside PyTorch's allocator: CUDA context, NCCL, other processes",
    "other_processes": "other processes on the same GPU",
    "free": "free on the GPU",
}
"""The categories of memory. Those of tensors, libraries, fragmentation and CUDA are the same as in an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """One out-of-memory error, as PyTorch's message gives it. `frames` is the traceback, innermost first.

    `process_bytes` is the process's memory according to the driver: reserved memory, CUDA context and NCCL. `unallocated_bytes` is
    reserved memory that no tensor uses. `other_processes` has bytes by process id.
    """

    rank: int | None = None
    gpu: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Mapping[int, int] = field(default_factory=dict)
    allocated_bytes: int | None = None
    private_pool_bytes: int = 0
    unallocated_bytes: int | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that PyTorch had reserved (`torch.cuda.memory_reserved`)."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    def as_dict(self) -> dict[str, Any]:
        return json_fields(self, without=("frames",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment in the step. Layers count from 1. `step` counts from 1 since recording began; `where` is a line of code."""

    phase: MomentPhase
    layer: int | None = None
    layers: int | None = None
    step: int | None = None
    where: str = ""

    @property
    def text(self) -> str:
        """The moment in words.

        >>> Moment(phase="backward", layer=3, layers=6, step=2, where="model.py:7 forward").text
        'backward of layer 3 of 6, step 2, at model.py:7 forward'
        """
        words = {"optimizer": "optimizer step", "unknown": "not known"}.get(self.phase, str(self.phase))
        if self.layer is not None:
            words += f" of layer {self.layer}" + (f" of {self.layers}" if self.layers else "")
        if self.step is not None and self.phase not in ("loading", "unknown"):
            words += f", step {self.step}"
        return f"{words}, at {self.where}" if self.where else words

    def as_dict(self) -> dict[str, Any]:
        return json_fields(self) | {"text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Tensors of one category that one place in the code allocated. `largest_bytes` is the largest of them.

    `module` is the class of the module, if the code's file is on this machine; else it is empty.
    """

    category: Category
    module: str = ""
    where: str
    n_bytes: int
    count: int
    largest_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "module": self.module,
            "where": self.where,
            "bytes": self.n_bytes,
            "count": self.count,
            "largest_bytes": self.largest_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(JsonFields):
    """A category that differs from the prediction, and the places in the code that allocated most of its measured bytes."""

    category: Category
    measured_bytes: int
    predicted_bytes: int
    because: str = ""
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(JsonFields):
    """The estimate of the job: its worst moment, and the moment of the diagnosis if the step has it.

    `needed_bytes` is for the worst moment of the job, `at_moment` bytes by category at the moment of the diagnosis.
    """

    job: str
    fits: bool | None
    needed_bytes: int | None
    peak_at: str | None
    at_moment: Mapping[Category, int]
    moment: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(JsonFields):
    """A change that makes the job fit, or saves memory. `options`: options of `estimate`, if the change can be expressed by them.

    `saves_bytes` is the most that it can save; None if that is unknown.
    """

    what: str
    because: str
    options: Mapping[str, Any] = field(default_factory=dict)
    saves_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Printable):
    """What filled one GPU's memory, at which moment, and changes that make the job fit.

    `memory` is bytes by category at `moment`, on the GPU of `device`. `out_of_memory` is None if there was no error: a snapshot
    is then explained at its peak. `ranks` has every error of a log; the diagnosis is of the one in `out_of_memory`.
    `changes` start with the cheapest.
    """

    file: str
    source: Source
    device: int | None
    moment: Moment
    out_of_memory: OutOfMemory | None
    memory: Mapping[Category, int]
    holdings: tuple[Holding, ...] = ()
    ranks: tuple[OutOfMemory, ...] = ()
    changes: tuple[Change, ...] = ()
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The sum of all categories: the GPU's memory if it is known, else the memory that PyTorch reserved."""
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON."""
        return {"schema_version": SCHEMA_VERSION} | json_fields(self)
