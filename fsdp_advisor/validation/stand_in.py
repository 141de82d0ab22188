"""Mode `stand-in`: one real GPU runs rank 0 of any world size, with a fake process group.

The collectives of the fake process group allocate like real ones and move nothing. Kernels, the caching allocator and its
statistics are real; only the time lacks communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorSegment
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation.choices import Device
from fsdp_advisor.validation.engines import fake_process_group
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.gpu_memory import Baseline, measure_baseline
from fsdp_advisor.validation.real import RealRun, check, run_steady_step


def stand_in(
    source: Source,
    plan: Plan,
    *,
    device: Device = "cuda",
    snapshot: Path | None = None,
    baseline: Baseline | None = None,
    segments: Iterable[AllocatorSegment] | None = None,
) -> dict[str, Any]:
    """Measured figures of a steady-state step of rank 0, on the first GPU or, counting live bytes, on the CPU.

    `baseline` is None if the caller has not made the CUDA context; `segments` are the allocator's as predicted. Raises
    ModeUnavailable without a GPU, and for DeepSpeed, which needs real ranks.
    """
    check(plan, device)
    if plan.backend == "deepspeed":
        raise ModeUnavailable(
            "DeepSpeed reads the data of other ranks, so one GPU cannot stand in for all",
            hint="--mode measure with as many GPUs as --gpus, or --backend fsdp2",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ModeUnavailable("no GPU was found; --mode stand-in needs one", hint="--mode simulate needs none")
    if snapshot is not None and device != "cuda":
        raise ModeUnavailable("PyTorch records a memory history only on GPUs", hint="omit --snapshot")
    if device == "cuda" and baseline is None:
        baseline = measure_baseline(0)
    run = RealRun(
        source=source,
        plan=plan,
        mode="stand-in",
        device=device,
        snapshot=snapshot,
        baseline=baseline,
        segments=segments,
    )
    with fake_process_group(plan.world_size):
        return run_steady_step(run)
