"""The second rung: one real GPU plays rank 0 of a world of any size.

The fake process group's collectives allocate what real ones allocate and move nothing, so kernels, the caching allocator and
its statistics are real, and only time lacks its communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp_advisor.plan import Plan
from fsdp_advisor.tracing.source import Source
from fsdp_advisor.validation.engines import fake_process_group
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.meter import CudaMeter, Meter
from fsdp_advisor.validation.real import assemble, check, figures, mesh_for, steady_step

SNAPSHOT_ENTRIES = 1_000_000


def stand_in(
    source: Source,
    plan: Plan,
    *,
    device: str = "cuda",
    meter: Meter | None = None,
    snapshot: Path | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """The figures of a steady-state step of rank 0, measured on this machine's first GPU (or under `meter`).

    `context` is the CUDA context's size where the caller has made it (`context_bytes`). Raises NotHere without a GPU, or for
    DeepSpeed, which needs real ranks.
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
    if device == "cuda" and context is None:
        context = context_bytes(0)
    watch: Meter = meter or CudaMeter(0)
    with memory_history(snapshot), fake_process_group(plan.world_size):
        mesh = mesh_for(plan, device, watch)
        with watch:
            trainer = assemble(source, plan, device, mesh, rung="stand-in")
            phases = steady_step(trainer, watch, plan.gradient_accumulation_steps, steady=2)
        found: dict[str, Any] = figures(phases, communicates=plan.world_size == 1)
        if device == "cuda":
            found |= device_figures(0, found["peak_reserved_bytes"])
    if context is not None:
        found["context_bytes"] = context
    return found


def context_bytes(index: int) -> int:
    """Makes the CUDA context and tells its size: what the driver gave out meanwhile (NVML), or else all it has given out.

    To be called before anything else touches the GPU. The second figure holds other processes' memory too, where there are any.
    """
    before = _used(index)
    torch.cuda.set_device(index)
    torch.zeros(1, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    after = _used(index)
    reserved = torch.cuda.memory_reserved(index)
    if before is not None and after is not None:
        return after - before - reserved
    free, total = torch.cuda.mem_get_info(index)
    return total - free - reserved


def _used(index: int) -> int | None:
    """Bytes of a GPU in use by anybody, from NVML."""
    try:
        return int(torch.cuda.device_memory_used(index))
    except Exception:  # no pynvml, or a GPU it does not answer for
        return None


def device_figures(index: int, peak_reserved_bytes: int) -> dict[str, Any]:
    """What the driver has given out at the peak: the allocator's reserve, the context, libraries' own and NCCL's."""
    free, total = torch.cuda.mem_get_info(index)
    stats = torch.cuda.memory_stats(index)
    return {
        "peak_device_bytes": peak_reserved_bytes + total - free - torch.cuda.memory_reserved(index),
        "device_memory_bytes": total,
        "allocator_retries": int(stats["num_alloc_retries"]),
        "segments": int(stats["segment.all.current"]),
    }


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
