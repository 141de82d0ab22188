"""Replaces functions of kernel packages, which need a GPU, by functions that only make the same allocations.

transformers calls the packages' functions if they are installed (integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`),
else functions in PyTorch, which save several times as much for backward. The replacements allocate, save and free the same tensors as the
packages' autograd functions, in the same order. Of the kernels only the work is counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from torch import nn

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

_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "causal_conv1d_fn": causal_conv1d,
    "mamba2_split_conv1d_scan_combined": split_conv1d_scan,
    "mamba_inner_fn": mamba_inner,
    "mamba_selective_scan": selective_scan,
    "rwkv_linear_attention": wkv,
}
"""Name of a function in transformers' models -> its replacement."""


@contextlib.contextmanager
def with_kernels(model: nn.Module) -> Iterator[None]:
    """Context in which the model's code calls the replacements of the packages' functions."""
    folders = GATED_DELTA_RULE | KIMI_DELTA_ATTENTION | SELECTIVE_SCAN | STATE_SPACE_DUALITY | WKV
    places = {f"transformers.models.{name}.modeling_{name}" for name in folders}
    with contextlib.ExitStack() as patches:
        for place in places & {type(module).__module__ for module in model.modules()}:
            code = sys.modules[place]
            for name, function in _FUNCTIONS.items():
                if hasattr(code, name):
                    patches.enter_context(mock.patch.object(code, name, function))
        yield
