"""A GPU's memory as the driver and PyTorch's allocator report it: before a run, at its end, and as a recorded history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_advisor.memory.allocator import AllocatorSegment
from fsdp_advisor.validation.snapshots import compare_snapshot

_HISTORY_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Baseline:
    """Bytes in use on a GPU before a run allocates: by this process's CUDA context, and by other processes."""

    context_bytes: int
    others_bytes: int


def measure_baseline(index: int) -> Baseline:
    """Make the CUDA context and measure it. Call it before anything else uses the GPU.

    The context is the growth of the memory in use according to NVML. Without NVML, it is all memory in use, so that memory of
    other processes counts as the context's.
    """
    before = _in_use(index)
    torch.cuda.set_device(index)
    torch.zeros(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    after = _in_use(index)
    reserved = torch.cuda.memory_reserved(index)
    free, total = torch.cuda.mem_get_info(index)
    not_reserved = total - free - reserved
    if before is None or after is None:
        return Baseline(not_reserved, 0)
    context = after - before - reserved
    return Baseline(context, max(0, not_reserved - context))


def _in_use(index: int) -> int | None:
    """Bytes of a GPU in use by all processes, from NVML; None if it does not answer."""
    try:
        return int(torch.cuda.device_memory_used(index))
    except Exception:  # pynvml is missing, or does not support this GPU
        return None


def allocator_figures(
    index: int, baseline: Baseline, peak_reserved_bytes: int, segments: Iterable[AllocatorSegment] | None
) -> dict[str, Any]:
    """The device's peak, the allocator's retries, and its segments compared with the predicted `segments`.

    Call it at the end of a step, while the model is alive. The device's peak is the allocator's peak plus the process's other memory at
    that time: CUDA context, kernels, and memory of NCCL and other libraries.
    """
    free, total = torch.cuda.mem_get_info(index)
    not_reserved = total - free - torch.cuda.memory_reserved(index) - baseline.others_bytes
    stats = torch.cuda.memory_stats(index)
    figures: dict[str, Any] = {
        "peak_device_bytes": peak_reserved_bytes + not_reserved,
        "context_bytes": baseline.context_bytes,
        "device_memory_bytes": total,
        "allocator_retries": int(stats["num_alloc_retries"]),
        "segments": int(stats["segment.all.current"]),
    }
    if segments is not None:
        own = [segment for segment in torch.cuda.memory_snapshot() if segment.get("device", index) == index]
        figures["snapshot"] = compare_snapshot(own, segments).as_dict()
    return figures


@contextmanager
def memory_history(path: Path | None) -> Iterator[None]:
    """Record PyTorch's memory history and write it for pytorch.org/memory_viz, even if the run fails. None: record nothing."""
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
