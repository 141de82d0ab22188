"""Imported before a consumer makes its arguments: accelerate then takes each CPU process over gloo for a GPU rank.

accelerate shards on accelerators alone (state.py: AcceleratorState looks for FSDP under MULTI_GPU and the like, never under
MULTI_CPU), and Trainer asks for a GPU that knows bf16. All that follows from a configuration is then their own code.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def _gloo(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def _cpu(self: PartialState) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = _gloo
PartialState.set_device = _cpu
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
