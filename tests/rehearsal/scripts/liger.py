"""Peaks of training steps with Liger's kernels, as transformers' Trainer applies them.

Argument: for each job the model's configuration, the precision, whether layers are checkpointed, whether adapters are trained, the
micro-batch and the length, as JSON. Triton's launches, which do nothing here, are left out with their compilation. They would count each
expert's tiles of tokens; instead tokens are spread evenly.
"""

from __future__ import annotations

import os

os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"

from typing import Any  # after the switch above
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from training import peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


def spread_evenly(module: Any) -> Any:
    """The module's `compute_routing_metadata`, which does not read the number of tiles on the host."""
    original = module.compute_routing_metadata

    def spread(chosen: torch.Tensor, experts: int) -> Any:
        tiles = experts * -(-chosen.numel() // (experts * module.BLOCK_M_TOKEN))
        with mock.patch.object(torch.Tensor, "item", lambda self: tiles):
            return original(chosen, experts)

    return spread


def peak_of(config: dict[str, Any], precision: str, checkpoints: bool, adapts: bool, batch: int, length: int) -> int:
    # imported here, because it initializes CUDA, after which a process cannot fork
    from liger_kernel.ops import fused_moe

    for launcher in (JITFunction, Autotuner):
        launcher.run = lambda *args, **kwargs: None
    fused_moe.compute_routing_metadata = spread_evenly(fused_moe)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    if adapts:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    return peak_of_trainer(
        model, list(range(1, length + 1)), batch, precision, use_liger_kernel=True, gradient_checkpointing=checkpoints
    )


def measured(job: list[Any]) -> int:
    return peak_of(*job)


if __name__ == "__main__":
    print_peaks(measured)
