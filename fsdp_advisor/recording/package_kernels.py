"""Replaces functions of kernel packages, which need a GPU, by functions that only make the same allocations.

transformers calls the packages' functions if they are installed (integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`),
else functions in PyTorch, which save several times as much for backward. The replacements allocate, save and free the same tensors as the
packages' autograd functions, in the same order. Of the kernels only the work is counted. Where a package is taken as not installed, the
functions in PyTorch run, even if it is installed here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any
from unittest import mock

from torch import nn

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.kernel_packages import pip_install
from fsdp_advisor.model.kernels import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    SELECTIVE_SCAN,
    STATE_SPACE_DUALITY,
    WKV,
)
from fsdp_advisor.recording.causal_conv1d import causal_conv1d
from fsdp_advisor.recording.kimi_delta_attention import chunk_kda
from fsdp_advisor.recording.linear_attention import chunk_gated_delta_rule
from fsdp_advisor.recording.selective_scan import mamba_inner, selective_scan
from fsdp_advisor.recording.state_space import split_conv1d_scan
from fsdp_advisor.recording.wkv import wkv

_PACKAGES = {
    "torch_chunk_gated_delta_rule": "fla",
    "chunk_kimi_delta_attention": "fla",
    "causal_conv1d_fn": "causal-conv1d",
    "mamba2_split_conv1d_scan_combined": "mamba-ssm",
    "mamba2_chunk_scan": "mamba-ssm",
    "mamba_inner_fn": "mamba-ssm",
    "mamba_selective_scan": "mamba-ssm",
    "rwkv_linear_attention": "kernels",
}
"""Name of a function in transformers' models -> the package that has kernels for it."""
_KERNELS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "causal_conv1d_fn": causal_conv1d,
    "mamba2_split_conv1d_scan_combined": split_conv1d_scan,
    "mamba_inner_fn": mamba_inner,
    "mamba_selective_scan": selective_scan,
    "rwkv_linear_attention": wkv,
}
"""Name of such a function -> what replaces it. Where Mamba-2's layers are fused, they do not call the scan alone."""


@contextlib.contextmanager
def with_kernels(model: nn.Module, missing: Container[str] = ()) -> Iterator[None]:
    """Context in which the model's code calls the replacements of the packages' functions, and transformers' own code instead of those of
    the `missing` packages.
    """
    folders = GATED_DELTA_RULE | KIMI_DELTA_ATTENTION | SELECTIVE_SCAN | STATE_SPACE_DUALITY | WKV
    places = {f"transformers.models.{name}.modeling_{name}" for name in folders}
    with contextlib.ExitStack() as patches:
        for place in places & {type(module).__module__ for module in model.modules()}:
            code = sys.modules[place]
            for name, package in _PACKAGES.items():
                if not hasattr(code, name):
                    continue
                if package in missing:
                    patches.enter_context(mock.patch.object(code, name, _own_code(getattr(code, name), package)))
                elif name in _KERNELS:
                    patches.enter_context(mock.patch.object(code, name, _KERNELS[name]))
        yield


def _own_code(function: Callable[..., Any], package: str) -> Callable[..., Any]:
    """transformers' own code for a function that may call a package. Like transformers, it refuses packed sequences, which only the
    packages keep apart. Source: integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`.
    """
    own = inspect.unwrap(function)

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise NotRecordable(
                f"without {package} transformers does not keep packed sequences apart, and stops",
                hint=pip_install([package]),
            )
        return own(*args, **kwargs)

    return run
