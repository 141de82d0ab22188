"""Peaks of requested memory in training steps of adapters on a base in 4 bits whose experts axolotl packs too, in transformers' Trainer.

Argument: for each job the model's configuration, whether layers are checkpointed, the micro-batch and the length, as JSON.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from axolotl.monkeypatch.moe_quant import get_moe_quantized_count, patch_moe_quantization_on_load
from lora_kernels import RequestedPeak
from peft import LoraConfig, get_peft_model
from training import peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig


class Settings:
    """axolotl's file, as far as its code for packed experts reads it."""

    load_in_8bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant = False, "nf4", True


def loaded(config: dict[str, Any]) -> Any:
    """The model as axolotl loads it."""
    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage="bfloat16",
        bnb_4bit_compute_dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(folder)
        patch_moe_quantization_on_load(Settings())
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=packing, device_map={"": 0}
        )
    assert get_moe_quantized_count()
    return model


def measured(job: list[Any]) -> int:
    config, checkpoints, batch, length = job
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(loaded(config), adapters)
    model.enable_input_require_grads()
    tokens = list(range(1, length + 1))
    return peak_of_trainer(
        model, tokens, batch, "bf16-mixed", found=RequestedPeak(), gradient_checkpointing=checkpoints
    )


if __name__ == "__main__":
    print_peaks(measured)
