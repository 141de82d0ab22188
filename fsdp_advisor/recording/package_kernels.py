"""Let a model's code call what packages with kernels allocate, in place of the packages, which need a GPU.

transformers calls their functions if the packages are installed (integrations/hub_kernels.py,
`use_kernel_func_from_hub_with_fallback`), else functions in PyTorch, which keep several times as much for backward. Ours allocate, save
and free what the packages' autograd functions do, in their order; kernels are left out but for their work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from torch import nn

from fsdp_advisor.model.kernels import GATED_DELTA_RULE, STATE_SPACE_DUALITY
from fsdp_advisor.recording.causal_conv1d import causal_conv1d
from fsdp_advisor.recording.linear_attention import chunk_gated_delta_rule
from fsdp_advisor.recording.state_space import split_conv1d_scan

_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "causal_conv1d_fn": causal_conv1d,
    "mamba2_split_conv1d_scan_combined": split_conv1d_scan,
}
"""By the names of the functions in transformers' models."""


@contextlib.contextmanager
def with_kernels(model: nn.Module) -> Iterator[None]:
    """Context in which the model's code finds the packages' functions."""
    folders = GATED_DELTA_RULE | STATE_SPACE_DUALITY
    places = {f"transformers.models.{name}.modeling_{name}" for name in folders}
    with contextlib.ExitStack() as patches:
        for place in places & {type(module).__module__ for module in model.modules()}:
            code = sys.modules[place]
            for name, function in _FUNCTIONS.items():
                if hasattr(code, name):
                    patches.enter_context(mock.patch.object(code, name, function))
        yield
