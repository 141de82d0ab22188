"""Workspaces of CUDA libraries that PyTorch's allocator holds besides tensors; `max_memory_allocated` counts them.

cuBLAS keeps one workspace per handle and stream. Every thread has its own handle. Forward runs in the caller's thread, backward
and recomputed activations in autograd's thread, so the compute stream has two workspaces. cuBLASLt shares them.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13): setWorkspaceForHandle, getCUDABlasLtWorkspace,
unified_cublas_and_lt_workspaces; c10's DeviceThreadHandlePool.

The workspaces of attention kernels are on the tapes of a GPU (Category.SCRATCH; `tapes` selects the tape). Those of reductions over
rows depend on the GPU and are computed by `program.reduction_workspace`. Not modelled: what cuDNN's engines use beyond the workspace
that cudnn-frontend requests, the workspaces of convolutions, and the kernels of GPUs before Ampere.
"""

from __future__ import annotations

import re

from fsdp_advisor.errors import UsageError

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
