"""Meters: the peak of each phase of a step. One counts the bytes of live storages, one reads CUDA's allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol
from unittest import mock

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from fsdp_advisor.program.storages import round_up
from fsdp_advisor.recording.storages import StorageWatch, local_tensor

CUDA_FIGURES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
"""Source: torch.cuda.memory_stats, `<figure>.all.peak`; `allocated_bytes` is what `max_memory_allocated` returns."""

Ids = frozenset[int]


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak of one phase: bytes by figure (`tensor_bytes`, or those of CUDA_FIGURES), and its duration."""

    peaks: dict[str, int]
    seconds: float

    def __or__(self, other: Phase) -> Phase:
        """The two as one phase: the higher peaks, the sum of the durations."""
        peaks = {k: max(v, other.peaks.get(k, 0)) for k, v in self.peaks.items()}
        return Phase(peaks, self.seconds + other.seconds)


class Meter(Protocol):
    """Used as a context around everything that allocates; phases follow each other."""

    def __enter__(self) -> Meter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, phase: str) -> None: ...

    def end(self) -> Phase: ...

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out: one that is on the host wherever the model is."""

    def settle(self) -> None:
        """Let go of what is left from building: it is no part of a step."""


class _Watch(StorageWatch):
    """Not seen is what holds nothing on a GPU: tensors on the meta device; the unsharded ones on which DTensor tries an operator
    to know the shape of its result, which torch 2.11 does in every step that runs under fake tensors; and gloo's own copy, of
    which `gloo_bytes` is the largest.

    gloo has no reduce-scatter: it copies the input, all-reduces the copy and splits it where the caller waits, which is where
    the copy first comes into sight. NCCL, in whose place gloo runs, makes none.
    Source: ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced (torch 2.13).
    """

    gloo_bytes = 0
    _tries = False

    def see(self, tensor: torch.Tensor) -> None:
        if not self._tries and not local_tensor(tensor).is_meta:
            super().see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.split.Tensor and not self.watches(args[0]):
            self.gloo_bytes = max(self.gloo_bytes, round_up(local_tensor(args[0]).untyped_storage().nbytes()))
            self.ignore(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> _Watch:
        name = "_propagate_tensor_meta_non_cached"
        propagate = getattr(ShardingPropagator, name)

        def unseen(*args: Any) -> Any:
            self._tries = True
            try:
                return propagate(*args)
            finally:
                self._tries = False

        self._patch = mock.patch.object(ShardingPropagator, name, unseen)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patch.stop()


class StorageMeter:
    """Live bytes of tensor storages, each rounded up to 512, of fake or of real tensors on the CPU.

    Each storage has a number from its birth (or from its growth out of nothing) on; `events` are those of the current step,
    as (number, bytes more or less), so that the live set at any moment can be told afterwards.
    """

    def __init__(self, *, timeline: bool = False) -> None:
        self.live = self.high = 0
        self.phase = "build"
        self.timeline: list[tuple[str, str, int]] = []
        self._keep_timeline = timeline
        self._watch = _Watch(self._resized)
        self._numbers: dict[int, int] = {}
        self._born = 0
        self._standing: dict[int, int] = {}
        self._events: list[tuple[int, int]] = []
        self._highest, self._highest_at = 0, 0
        self._began = 0.0

    def __enter__(self) -> StorageMeter:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def _resized(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        more = round_up(after) - round_up(before)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._born
            self._born += 1
        if after == 0:
            del self._numbers[key]
        self._events.append((number, more))
        self.live += more
        self.high = max(self.high, self.live)
        if self.live > self._highest:
            self._highest, self._highest_at = self.live, len(self._events)
        if self._keep_timeline:
            self.timeline.append((self.phase, operator, self.live))

    @property
    def gloo_bytes(self) -> int:
        """The largest copy that gloo has made to reduce-scatter, which is in no figure."""
        return self._watch.gloo_bytes

    def ignore(self, tensor: torch.Tensor) -> None:
        self._watch.ignore(tensor)

    def begin(self, phase: str) -> None:
        self.phase, self.high, self._began = phase, self.live, time.perf_counter()

    def end(self) -> Phase:
        return Phase({"tensor_bytes": self.high}, time.perf_counter() - self._began)

    def settle(self) -> None:
        gc.collect()

    def begin_step(self) -> None:
        """Forget the events so far; what is alive now stands from before the step."""
        standing = self._standing
        for number, more in self._events:
            standing[number] = standing.get(number, 0) + more
        self._standing = {number: n_bytes for number, n_bytes in standing.items() if n_bytes}
        self._events.clear()
        self.timeline.clear()
        self._highest, self._highest_at = self.live, 0

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> Ids:
        """The numbers of the storages behind tensors, as far as they are alive and were seen."""
        keys = {local_tensor(t).untyped_storage()._cdata for t in tensors}
        return frozenset(self._numbers[key] for key in keys if key in self._numbers)

    def at_peak(self, accounts: dict[str, Ids]) -> dict[str, int]:
        """Bytes alive at the step's highest moment, by account; `kept` and `step` are the rest: alive before it, born in it."""
        alive = dict(self._standing)
        for number, more in self._events[: self._highest_at]:
            alive[number] = alive.get(number, 0) + more
        result = dict.fromkeys((*accounts, "kept", "step"), 0)
        for number, n_bytes in alive.items():
            account = next((name for name, numbers in accounts.items() if number in numbers), None)
            result[account or ("kept" if number in self._standing else "step")] += n_bytes
        return result


class CudaMeter:
    """What CUDA's caching allocator says: `reset_peak_memory_stats` at a phase's start, peaks at its end.

    The allocator counts when the host asks, so phases need no waiting for the GPU, which would change what it holds; only a
    step's end waits, as reading the loss does. Durations are therefore right for whole steps alone.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._began = 0.0
        self._phase = ""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, phase: str) -> None:
        self._phase = phase
        torch.cuda.reset_peak_memory_stats(self._index)
        self._began = time.perf_counter()

    def end(self) -> Phase:
        if self._phase == "optimizer":
            torch.cuda.synchronize(self._index)
        seconds = time.perf_counter() - self._began
        stats = torch.cuda.memory_stats(self._index)
        return Phase({name: int(stats[f"{name}.all.peak"]) for name in CUDA_FIGURES}, seconds)

    def ignore(self, tensor: torch.Tensor) -> None:
        pass

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
