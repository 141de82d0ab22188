"""Patches accelerate to treat each CPU process over gloo as a GPU rank. Import it before creating any arguments.

accelerate shards only on accelerators (state.py: AcceleratorState does not check for FSDP under MULTI_CPU), and the Trainer
requires a GPU with bf16. DeepSpeed does not compile its shared-memory operator. Everything else is the consumers' own code.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator


def _gloo(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def _cpu(self: PartialState) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = _gloo
PartialState.set_device = _cpu
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
skip_shm_operator()
