"""Peaks of requested memory in training steps with axolotl's kernels for adapters, in transformers' Trainer.

Argument: for each job the model's configuration, whether the base is in 4 bits, whether layers are checkpointed, the dropout of the
adapters, the keys of axolotl's file that are false, the micro-batch and the length, as JSON. Triton's launches, which do nothing here, are
left out with their compilation.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from training import SteadyPeak, peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.jit import JITFunction

KEYS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class RequestedPeak(SteadyPeak):
    """The peak of what the steps after the first request, without the rests of blocks, which the allocator counts as allocated."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.peak = max(self.peak, torch.cuda.memory_stats()["requested_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats()


def of_axolotl() -> Any:
    """axolotl's module lora_kernels, without the rest of the package, which needs further packages."""
    (folder,) = importlib.util.find_spec("axolotl").submodule_search_locations  # type: ignore[union-attr]  # it is installed
    callbacks = types.ModuleType("axolotl.utils.callbacks")
    callbacks.__path__ = [str(Path(folder, "utils", "callbacks"))]
    settings: Any = types.ModuleType("axolotl.utils.dict")
    settings.DictDefault = dict
    sys.modules |= {callbacks.__name__: callbacks, settings.__name__: settings}
    return importlib.import_module("axolotl.monkeypatch.lora_kernels")


def in_4_bits(model: Any) -> None:
    """Quantize the linear layers of decoder layers as axolotl's defaults do."""
    import bitsandbytes as bnb

    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                module.bias is not None,
                torch.bfloat16,
                True,
                "nf4",
                torch.bfloat16,
            )
            model.model.layers.set_submodule(name, packed.to(torch.bfloat16).cuda())


def peak_of(
    config: dict[str, Any], packs: bool, checkpoints: bool, dropout: float, off: list[str], batch: int, length: int
) -> int:
    module = of_axolotl()
    JITFunction.run = lambda *args, **kwargs: None
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    if packs:
        in_4_bits(model)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    model = get_peft_model(model, adapters)
    keys = types.SimpleNamespace(use_scattermoe=None, use_sonicmoe=None, **{key: key not in off for key in KEYS})
    attention = type(model.base_model.model.model.layers[0].self_attn)
    with mock.patch.object(module, "get_attention_cls_from_config", lambda _: attention):
        module.patch_self_attn_lora(keys)
    module.apply_lora_kernel_patches(model, keys)
    model.enable_input_require_grads()
    tokens = list(range(1, length + 1))
    return peak_of_trainer(
        model, tokens, batch, "bf16-mixed", found=RequestedPeak(), gradient_checkpointing=checkpoints
    )


def measured(job: list[Any]) -> int:
    return peak_of(*job)


if __name__ == "__main__":
    print_peaks(measured)
