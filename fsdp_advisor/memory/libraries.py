"""Workspaces of CUDA libraries, which PyTorch's allocator holds in addition to tensors. `max_memory_allocated` includes them.

cuBLAS keeps one workspace per handle and stream. Every thread has its own handle. Forward runs in the caller's thread, backward
and recomputation in autograd's thread, so the compute stream has two workspaces. cuBLASLt shares them.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13): setWorkspaceForHandle, getCUDABlasLtWorkspace,
unified_cublas_and_lt_workspaces; c10's DeviceThreadHandlePool.

Workspaces of attention kernels are on the GPU tapes (Category.SCRATCH; `tapes` selects the tape). `program.reduction_workspace`
computes those of reductions over rows, which depend on the GPU. Not modelled: memory of cuDNN's engines beyond the workspace that
cudnn-frontend requests, workspaces of convolutions, and the kernels of GPUs before Ampere.
"""

from __future__ import annotations

import re

from fsdp_advisor.errors import UsageError

KIB = 2**10
WORKSPACES = 2
"""Number of workspaces: one for the thread that runs forward, one for autograd's thread."""
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
"""`:4096:2:16:8`, the default before Hopper."""
LARGE_WORKSPACE = 8 * 4096 * KIB
"""The default of Hopper and Blackwell."""
LARGE_ON = (9, 10, 12)
"""Compute capabilities (major) with the larger default."""


def cublas_workspace_bytes(compute_capability: tuple[int, int] | None, config: str | None = None) -> int:
    """Bytes of one workspace. An unknown GPU (None) has the larger default. `config` is `CUBLAS_WORKSPACE_CONFIG`:
    ``:KiB:count``, repeated.

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
