"""The key of the GPU tape that replaces a CPU tape. It depends on the kernels that sdpa chooses on the GPU."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from fsdp_advisor.model.tape_key import TapeKey

FLASH_FROM = (8, 0)
"""The compute capability from which sdpa has a flash kernel. Source: ATen/native/transformers/cuda/sdp_utils.cpp."""
CUDNN_ON = (9, 10)
"""Compute capabilities (major) on which sdpa prefers cuDNN, from its 9.15.1. Source: the same file,
check_prefer_cudnn_attention.
"""


def gpu_tape_key(
    key: TapeKey,
    compute_capability: tuple[int, int] | None = None,
    *,
    window_filled: bool = False,
    recorded: Container[str] = (),
) -> TapeKey:
    """The key of the GPU tape that replaces `key`'s tape. On an unknown GPU (None) sdpa is assumed to prefer cuDNN.

    `window_filled`: whether sequences fill the model's sliding window. In half precision sdpa uses the tape of flash_attention_2,
    unless `recorded` (names) contains a separate sdpa tape. Models have one if their code or the batch passes sdpa a mask, or for heads
    that the flash kernel does not support. For GPUs before Ampere the kernels are not modelled: returns `key` unchanged.
    """
    if key.attention == "flash_attention_2":
        return key
    if key.attention == "eager":
        return replace(key, device="gpu")
    on_gpu = replace(key, device="gpu", window_filled=window_filled)
    if key.precision == "fp32":
        return on_gpu
    if compute_capability is not None and compute_capability < FLASH_FROM:
        return key
    by_cudnn = replace(key, device="gpu", kernel="cudnn", window_filled=window_filled)
    if by_cudnn.name in recorded and (compute_capability is None or compute_capability[0] in CUDNN_ON):
        return by_cudnn
    if on_gpu.name in recorded or key.masks or key.compile != "none":
        return on_gpu
    return replace(key, device="gpu", attention="flash_attention_2", batch_is_one=False)


def gpu_tape_keys(key: TapeKey, *, window_filled: bool, mixes_head_widths: bool) -> tuple[TapeKey, ...]:
    """The keys that `gpu_tape_key` may return for a model outside the catalog. cuDNN's kernel has its own key in compiled code, and where
    the flash kernel does not apply: with a mask, or if the model mixes widths of heads.
    """
    if key.attention != "sdpa":
        return (gpu_tape_key(key),)
    on_gpu = replace(key, device="gpu", window_filled=window_filled)
    if not (window_filled or mixes_head_widths or key.masks or key.compile != "none") or key.precision == "fp32":
        return (on_gpu,)
    return on_gpu, replace(key, device="gpu", kernel="cudnn", window_filled=window_filled)
