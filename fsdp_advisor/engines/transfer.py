"""One way of loading, and what it is reckoned with. N = ranks that share one copy; K = bytes per element as it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.storages import NO_STORAGES, Storages

S = TypeVar("S")
T = TypeVar("T")
W = TypeVar("W", bound="Way")

CHECKPOINT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What comes onto rank 0's GPU together: `passing` is freed once `kept` has been made of it, and stays in PyTorch's cache."""

    passing: Storages = NO_STORAGES
    kept: Storages = NO_STORAGES


PlacedUnits = tuple[tuple[Placed, ...], ...]
"""One unit after the other. Those that are alike are one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of loading or saving, at its highest. `gpu_bytes` of one rank; host bytes are private memory of a process, by rank.

    `how` says what to write.
    """

    way: str
    how: str
    gpu_bytes: int
    first_rank_host_bytes: int
    other_ranks_host_bytes: int
    ranks_per_node: int

    @property
    def host_bytes_per_node(self) -> int:
        """Of the node that holds rank 0."""
        return self.first_rank_host_bytes + (self.ranks_per_node - 1) * self.other_ranks_host_bytes

    @classmethod
    def of(
        cls: type[W], plan: Plan, way: str, how: str, gpu: int, first: int, others: int | None = None, **more: Any
    ) -> W:
        """`first` and `others` are host bytes: of rank 0 and, where they differ, of each other rank."""
        return cls(
            way=way,
            how=how,
            gpu_bytes=gpu,
            first_rank_host_bytes=first,
            other_ranks_host_bytes=first if others is None else others,
            ranks_per_node=plan.ranks_per_node,
            **more,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Way):
    """One way of loading.

    `mapped_bytes`: pages of the checkpoint's file, once per node, which the kernel drops when memory is short; None where the
    checkpoint's dtype is unknown. `placed`: how weights come onto the GPU, in order, by unit; empty where nothing passes
    through it, and where that is not modelled (DDP's broadcast, the modules of zero.Init).
    """

    mapped_bytes: int | None = None
    placed: PlacedUnits = field(default=(), compare=False, repr=False)


def loaded_element_bytes(plan: Plan) -> int:
    """K: what `from_pretrained(dtype=...)` is told. FSDP and DDP keep the masters; DeepSpeed the compute dtype."""
    return plan.compute_bytes if plan.backend == "deepspeed" else plan.param_bytes


def one_copy_bytes(profile: Profile, plan: Plan) -> int:
    """The whole model once, as it is loaded."""
    return profile.parameters * loaded_element_bytes(plan)


def checkpoint_element_bytes(profile: Profile) -> int | None:
    """Bytes per element of the checkpoint, where the model's configuration says so."""
    dtype = profile.config.get("dtype") or profile.config.get("torch_dtype")
    return CHECKPOINT_BYTES.get(str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Weights:
    """The host's side: a private copy of the whole model, or none where the file's pages serve."""

    copy: int
    mapped: int | None

    @classmethod
    def of(cls, profile: Profile, plan: Plan) -> Weights:
        kept, stored = loaded_element_bytes(plan), checkpoint_element_bytes(profile)
        mapped = None if stored is None else stored * profile.parameters
        return cls(0 if kept == stored else kept * profile.parameters, mapped)


def highest(placed: PlacedUnits) -> int:
    """The highest point of placing one unit after the other."""
    kept = high = 0
    for rise, stays in for_each(placed, _rise):
        high = max(high, kept + rise)
        kept += stays
    return high


def _rise(unit: tuple[Placed, ...]) -> tuple[int, int]:
    """How high a unit goes, and what stays of it."""
    kept = high = 0
    for one in unit:
        high = max(high, kept + one.passing.rounded + one.kept.rounded)
        kept += one.kept.rounded
    return high, kept


def for_each(units: Sequence[S], measure: Callable[[S], T]) -> tuple[T, ...]:
    """`measure` of every unit, taken once of those that are one object."""
    known = {id(unit): unit for unit in units}
    measured = {key: measure(unit) for key, unit in known.items()}
    return tuple([measured[id(unit)] for unit in units])
