"""What libraries take through PyTorch's allocator beside tensors: part of `max_memory_allocated`.

cuBLAS keeps a workspace per handle and stream. A thread has a handle of its own: forward runs in the caller's thread, backward
(with what activation checkpointing recomputes) in autograd's, so there are two on the compute stream. cuBLASLt shares them.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13), setWorkspaceForHandle, getCUDABlasLtWorkspace,
unified_cublas_and_lt_workspaces; c10's DeviceThreadHandlePool.

Attention kernels' scratch stands on the tapes recorded with `flash_attention_2` (Category.SCRATCH). sdpa comes to the same on
GPUs from Ampere on in bf16 and fp16, for heads of up to 256 and without a mask (`real_attention`). With a mask and in fp32 it
comes to other kernels or to none, which has tapes of its own (`recording.on_gpu`). What sums over rows stage hangs on the GPU, and
is reckoned for it (`staging`) where the tape has such sums: the catalog's tapes have, of every family of which PyTorch took more
than 0.1 % of a peak for them. Not known: what cuDNN's own engines add to the workspace that cudnn-frontend asks for, the workspace
of convolutions, and the kernels of older GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.errors import UsageError
from fsdp_advisor.model.profile import (
    EAGER_ON_GPU,
    SDPA_BY_CUDNN,
    SDPA_BY_CUDNN_WINDOWED,
    SDPA_ON_GPU,
    SDPA_ON_GPU_WINDOWED,
    Variant,
)

KIB = 2**10
WORKSPACES = 2
"""Of the thread that runs forward and of autograd's."""
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
"""`:4096:2:16:8`, the default before Hopper."""
LARGE_WORKSPACE = 8 * 4096 * KIB
"""The default of Hopper and Blackwell."""
LARGE_ON = (9, 10, 12)
"""Compute capabilities (major) with the large one."""
FLASH_FROM = (8, 0)
"""The compute capability from which sdpa has a flash kernel. Source: ATen/native/transformers/cuda/sdp_utils.cpp."""
CUDNN_ON = (9, 10)
"""Compute capabilities (major) on which sdpa prefers cuDNN, from its 9.15.1. Source: likewise, check_prefer_cudnn_attention."""


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


def real_attention(
    variant: Variant,
    compute_capability: tuple[int, int] | None = None,
    *,
    windowed: bool = False,
    recorded: Container[str] = (),
) -> Variant:
    """The recording that a GPU's kernels come to: for sdpa the one without the masks and repeated heads of fake tensors.

    `windowed` says that the sequences fill the model's sliding window. In half precision recordings of its own are among those
    `recorded` (by key) where sdpa does not come to the flash kernel's like throughout. An unknown GPU is one with cuDNN's.
    """
    if variant.attention == "eager":
        return _with(variant, EAGER_ON_GPU)
    if variant.attention != "sdpa":
        return variant
    on_gpu = _with(variant, SDPA_ON_GPU_WINDOWED if windowed else SDPA_ON_GPU)
    if variant.precision == "fp32":
        return on_gpu
    if compute_capability is not None and compute_capability < FLASH_FROM:
        return variant
    by_cudnn = _with(variant, SDPA_BY_CUDNN_WINDOWED if windowed else SDPA_BY_CUDNN)
    if by_cudnn.key in recorded and (compute_capability is None or compute_capability[0] in CUDNN_ON):
        return by_cudnn
    if on_gpu.key in recorded:
        return on_gpu
    return _with(variant, "flash_attention_2")


def to_record(variant: Variant, *, windowed: bool) -> tuple[Variant, ...]:
    """The recordings of a model's own that `real_attention` may ask for, on whatever GPU. cuDNN has its own where there is a mask."""
    if variant.attention != "sdpa":
        return (real_attention(variant),)
    if not windowed:
        return (_with(variant, SDPA_ON_GPU),)
    by_cudnn = () if variant.precision == "fp32" else (_with(variant, SDPA_BY_CUDNN_WINDOWED),)
    return (_with(variant, SDPA_ON_GPU_WINDOWED), *by_cudnn)


@lru_cache(maxsize=1024)
def _with(variant: Variant, attention: str) -> Variant:
    """The flash kernel treats any B alike."""
    return replace(variant, attention=attention, single=variant.single and attention != "flash_attention_2")
