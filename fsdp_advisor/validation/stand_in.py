"""The second rung: one real GPU plays rank 0 of a world of any size.

The fake process group's collectives allocate what real ones allocate and move nothing, so kernels, the caching allocator and
its statistics are real, and only time lacks its communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import Segment
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation.engines import fake_process_group
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.meter import CudaMeter, Meter
from fsdp_advisor.validation.on_gpu import STEADY
from fsdp_advisor.validation.real import assemble, check, figures, mesh_for, steady_step
from fsdp_advisor.validation.snapshots import compare_snapshot

SNAPSHOT_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a GPU holds before a run allocates: this process's CUDA context, and what other processes have."""

    context_bytes: int
    others_bytes: int


def stand_in(
    source: Source,
    plan: Plan,
    *,
    device: str = "cuda",
    meter: Meter | None = None,
    snapshot: Path | None = None,
    base: Baseline | None = None,
    segments: Iterable[Segment] | None = None,
) -> dict[str, Any]:
    """The figures of a steady-state step of rank 0, measured on this machine's first GPU (or under `meter`).

    `base` is what the GPU held where the caller has made the CUDA context (`baseline`); `segments` what the allocator is
    predicted to hold in the end. Raises NotHere without a GPU, or for DeepSpeed, which needs real ranks.
    """
    check(plan, device)
    if plan.backend == "deepspeed":
        raise NotHere(
            "deepspeed looks into what other ranks sent, so nothing can stand in for them",
            hint="--rung measure with as many GPUs as --gpus, or --backend fsdp2",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise NotHere("no GPU is at hand, and a stand-in needs one", hint="--rung simulate needs none")
    if snapshot is not None and device != "cuda":
        raise NotHere("PyTorch keeps a memory history of GPUs alone", hint="leave --snapshot out")
    if device == "cuda" and base is None:
        base = baseline(0)
    watch: Meter = meter or CudaMeter(0)
    with memory_history(snapshot), fake_process_group(plan.world_size):
        mesh = mesh_for(plan, device, watch)
        with watch:
            trainer = assemble(source, plan, device, mesh, rung="stand-in")
            phases = steady_step(trainer, watch, plan.gradient_accumulation_steps, steady=STEADY["stand-in"])
        found: dict[str, Any] = figures(phases, communicates=plan.world_size == 1)
        if base is not None:
            found |= allocator_figures(0, base, found, segments)
    return found if snapshot is None else untimed(found)


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run whose memory history was kept: the stack of each allocation is walked, which takes its time."""
    return {name: value for name, value in found.items() if not name.startswith("step_seconds")}


def baseline(index: int) -> Baseline:
    """Makes the CUDA context and tells its size: what the driver gave out meanwhile (NVML), or else all it has given out.

    To be called before anything else touches the GPU. Without NVML other processes' memory counts as the context's.
    """
    before = _used(index)
    torch.cuda.set_device(index)
    torch.zeros(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    after = _used(index)
    reserved = torch.cuda.memory_reserved(index)
    free, total = torch.cuda.mem_get_info(index)
    given_out = total - free - reserved
    if before is None or after is None:
        return Baseline(given_out, 0)
    context = after - before - reserved
    return Baseline(context, max(0, given_out - context))


def _used(index: int) -> int | None:
    """Bytes of a GPU in use by anybody, from NVML."""
    try:
        return int(torch.cuda.device_memory_used(index))
    except Exception:  # no pynvml, or a GPU it does not answer for
        return None


def allocator_figures(
    index: int, base: Baseline, measured: Mapping[str, Any], segments: Iterable[Segment] | None
) -> dict[str, Any]:
    """What this process holds of the GPU at the peak, what the allocator had to do for it, and what it holds block by block.

    Called at the end of a step, with the model still there. The device's peak is the allocator's, with all else that the
    driver has given out to this process: its context, kernels, libraries' own memory and NCCL's.
    """
    free, total = torch.cuda.mem_get_info(index)
    beside = total - free - torch.cuda.memory_reserved(index) - base.others_bytes
    stats = torch.cuda.memory_stats(index)
    found: dict[str, Any] = {
        "peak_device_bytes": int(measured["peak_reserved_bytes"]) + beside,
        "context_bytes": base.context_bytes,
        "device_memory_bytes": total,
        "allocator_retries": int(stats["num_alloc_retries"]),
        "segments": int(stats["segment.all.current"]),
    }
    if segments is not None:
        held = [segment for segment in torch.cuda.memory_snapshot() if segment.get("device", index) == index]
        found["snapshot"] = compare_snapshot(held, segments).as_dict()
    return found


@contextmanager
def memory_history(path: Path | None) -> Iterator[None]:
    """Keep PyTorch's memory history and write it for its viewer (pytorch.org/memory_viz), out-of-memory or not."""
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
