"""What libraries take through PyTorch's allocator beside tensors: part of `max_memory_allocated`.

cuBLAS keeps a workspace per handle and stream. A thread has a handle of its own: forward runs in the caller's thread, backward
(with what activation checkpointing recomputes) in autograd's, so there are two on the compute stream. cuBLASLt shares them.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13), setWorkspaceForHandle, getCUDABlasLtWorkspace,
unified_cublas_and_lt_workspaces; c10's DeviceThreadHandlePool.

Attention kernels' scratch is on the tapes of a GPU (Category.SCRATCH; `tapes` picks the tape). What sums over rows stage depends on
the GPU and is computed for it (`staging`) where the tape has such sums: the catalog's tapes have them for every family of which
PyTorch took more than 0.1 % of a peak for them. Not known: what cuDNN's own engines add to the workspace that cudnn-frontend asks
for, the workspace of convolutions, and the kernels of GPUs before Ampere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.course import Followed
from fsdp_advisor.memory.ledger import SCRATCH
from fsdp_advisor.memory.step import replayed
from fsdp_advisor.memory.storages import round_up
from fsdp_advisor.model.profile import Profile, Tape

KIB = 2**10
WORKSPACES = 2
"""Of the thread that runs forward and of autograd's."""
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
"""`:4096:2:16:8`, the default before Hopper."""
LARGE_WORKSPACE = 8 * 4096 * KIB
"""The default of Hopper and Blackwell."""
LARGE_ON = (9, 10, 12)
"""Compute capabilities (major) with the large one."""


def cublas_workspace_bytes(compute_capability: tuple[int, int] | None, config: str | None = None) -> int:
    """One workspace; of an unknown GPU the larger default. `config` is `CUBLAS_WORKSPACE_CONFIG`: ``:KiB:count``, repeated.

    Source: parseChosenWorkspaceSize.
    >>> cublas_workspace_bytes((8, 0)), cublas_workspace_bytes((9, 0)), cublas_workspace_bytes((9, 0), ":4096:8")
    (8519680, 33554432, 33554432)
    """
    if config:
        pairs = re.findall(r":(\d+):(\d+)", config)
        if not pairs:
            raise UsageError(f"CUBLAS_WORKSPACE_CONFIG: {config!r} is not :SIZE:COUNT", hint="for example :4096:8")
        return sum(int(kib) * KIB * int(count) for kib, count in pairs)
    large = compute_capability is None or compute_capability[0] in LARGE_ON
    return LARGE_WORKSPACE if large else SMALL_WORKSPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The highest of a step on a GPU: `step` with kernels' own scratch among its accounts, and cuBLAS's workspaces."""

    step: Followed
    workspace_bytes: int

    @property
    def tensor_bytes(self) -> int:
        return self.step.peak - self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.step.at_peak[SCRATCH]

    @property
    def peak_bytes(self) -> int:
        return self.step.peak + self.workspace_bytes


def allocated(
    profile: Profile, tape: Tape, plan: Plan, *, workspace_bytes: int, resident_threads: int = 0
) -> Allocated:
    """What is allocated at the highest, each storage rounded up to 512; `workspace_bytes` is that of one workspace, and
    `resident_threads` the GPU's, for what sums over rows stage.

    `max_memory_allocated` counts whole blocks, which may exceed this by up to 1 MiB each where the large pool leaves a block
    unsplit: `allocator.reserve` has that figure.
    """
    # what stages nothing is the same on every GPU, and remembered for all
    step = replayed(profile, tape, plan, scratch_on=resident_threads if tape.stages else 0)
    return Allocated(step=step, workspace_bytes=WORKSPACES * round_up(workspace_bytes))
