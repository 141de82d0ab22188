"""Meters of the peak memory of each phase of a step: live tensor storages, or CUDA's allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from fsdp_advisor.program.storages import round_up
from fsdp_advisor.recording.storages import StorageWatch, local_tensor

CUDA_FIGURES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
"""Source: torch.cuda.memory_stats, `<figure>.all.peak`; `allocated_bytes` is what `max_memory_allocated` returns."""

StorageIds = frozenset[int]


@dataclass(frozen=True, slots=True)
class Phase:
    """The peaks of one phase in bytes (`tensor_bytes`, or CUDA_FIGURES), and its duration."""

    peaks: dict[str, int]
    seconds: float

    def __or__(self, other: Phase) -> Phase:
        """Both phases as one: the higher peaks, the sum of the durations."""
        peaks = {k: max(v, other.peaks.get(k, 0)) for k, v in self.peaks.items()}
        return Phase(peaks, self.seconds + other.seconds)


class _Watch(StorageWatch):
    """A StorageWatch that ignores storages that do not exist on the GPU in a real run.

    These are tensors on the meta device and gloo's own copies (the largest has `gloo_bytes`). With torch 2.11 they are also unsharded
    tensors on which DTensor runs an operator only to know the shape of its result, in every step under fake tensors.

    gloo has no reduce-scatter: it copies the input, all-reduces the copy, and splits it when the caller waits. The split is the first
    operator that sees the copy. NCCL makes no copy. Source: ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced (torch 2.13).
    """

    gloo_bytes = 0
    _propagating_shapes = False

    def see(self, tensor: torch.Tensor) -> None:
        if not self._propagating_shapes and not local_tensor(tensor).is_meta:
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

        def unwatched(*args: Any) -> Any:
            self._propagating_shapes = True
            try:
                return propagate(*args)
            finally:
                self._propagating_shapes = False

        self._patch = mock.patch.object(ShardingPropagator, name, unwatched)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()


class StorageMeter:
    """Live bytes of the storages of fake tensors, or of real tensors on the CPU. Each storage is rounded up to 512 bytes.

    A storage gets an id when it is allocated, and a new one when it grows from 0 bytes. The events of the current step, (id, change in
    bytes), determine the live storages at its peak.
    """

    def __init__(self, *, timeline: bool = False) -> None:
        self.live = self.high = 0
        self.phase = "build"
        self.timeline: list[tuple[str, str, int]] = []
        self._keep_timeline = timeline
        self._watch = _Watch(self._resized)
        self._ids: dict[int, int] = {}
        self._next_id = 0
        self._live_before_step: dict[int, int] = {}
        self._events: list[tuple[int, int]] = []
        self._peak, self._peak_at = 0, 0
        self._began = 0.0

    def __enter__(self) -> StorageMeter:
        self._watch.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._watch.__exit__(*exception)

    def _resized(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        change = round_up(after) - round_up(before)
        storage = self._ids.get(key)
        if storage is None:
            storage = self._ids[key] = self._next_id
            self._next_id += 1
        if after == 0:
            del self._ids[key]
        self._events.append((storage, change))
        self.live += change
        self.high = max(self.high, self.live)
        if self.live > self._peak:
            self._peak, self._peak_at = self.live, len(self._events)
        if self._keep_timeline:
            self.timeline.append((self.phase, operator, self.live))

    @property
    def gloo_bytes(self) -> int:
        """The largest copy that gloo has made for a reduce-scatter. No figure includes it."""
        return self._watch.gloo_bytes

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor's storage from now on, because in a real run on a GPU it is in host or managed memory."""
        storage = local_tensor(tensor).untyped_storage()
        if storage._cdata in self._ids:
            self._resized(storage._cdata, storage.nbytes(), 0, "ignore", ())
        self._watch.ignore(tensor)

    def begin(self, phase: str) -> None:
        self.phase, self.high, self._began = phase, self.live, time.perf_counter()

    def end(self) -> Phase:
        return Phase({"tensor_bytes": self.high}, time.perf_counter() - self._began)

    def settle(self) -> None:
        """Collect garbage that is left from building the model."""
        gc.collect()

    def begin_step(self) -> None:
        """Start a step: drop the events of the previous step. Storages that are alive now count as allocated before the step."""
        self._live_before_step = self._live_after(len(self._events))
        self._events.clear()
        self.timeline.clear()
        self._peak, self._peak_at = self.live, 0

    def storage_ids(self, tensors: Iterable[torch.Tensor]) -> StorageIds:
        """The ids of the tensors' storages that are alive and were seen."""
        keys = {local_tensor(t).untyped_storage()._cdata for t in tensors}
        return frozenset(self._ids[key] for key in keys if key in self._ids)

    def at_peak(self, accounts: dict[str, StorageIds]) -> dict[str, int]:
        """Bytes alive at the step's peak, by account. Other storages count as `kept` (alive before the step) or `step`."""
        result = dict.fromkeys((*accounts, "kept", "step"), 0)
        for storage, n_bytes in self._live_after(self._peak_at).items():
            account = next((name for name, ids in accounts.items() if storage in ids), None)
            result[account or ("kept" if storage in self._live_before_step else "step")] += n_bytes
        return result

    def _live_after(self, events: int) -> dict[int, int]:
        """Bytes of each live storage after the first `events` events of the step."""
        live = dict(self._live_before_step)
        for storage, change in self._events[:events]:
            live[storage] = live.get(storage, 0) + change
        return {storage: n_bytes for storage, n_bytes in live.items() if n_bytes}


class CudaMeter:
    """The peaks of CUDA's caching allocator: reset at a phase's start, read at its end.

    The allocator counts when the host allocates, so phases do not wait for the GPU; waiting would change what is allocated. Only the
    end of a step waits, as reading the loss does. Durations are therefore correct only for whole steps.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._began = 0.0
        self._phase = ""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *exception: Any) -> None:
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


Meter = StorageMeter | CudaMeter
"""A context around everything that allocates. Phases follow each other: `begin`, `end`, `begin`, ..."""
