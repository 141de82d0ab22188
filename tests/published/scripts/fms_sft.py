"""One job of fms-acceleration's benchmark: `python fms_sft.py JOB`, in the versions that its README names.

Rewritten from fms-hf-tuning 2.5.0 (tuning/sft_trainer.py, `train`) and fms-acceleration 876e2ed (framework_plugin_bnb.py): packed
sequences, flash attention, gradient checkpointing, AdamW. The model is built from its configuration, on the GPU or, for FSDP, on meta.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, default_data_collator
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from trl import SFTConfig, SFTTrainer

SEVERAL = int(os.environ.get("WORLD_SIZE", "1")) > 1
STEPS = 4


def built(config: str) -> Any:
    """The model in bfloat16, without weights of its own."""
    with torch.device("meta" if SEVERAL else "cuda"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        )


def in_4_bits(config: str) -> Any:
    """The model with a base in 4 bits, as the plugin for bitsandbytes loads it."""
    from bitsandbytes.nn import Params4bit

    storage = {"bnb_4bit_quant_storage": torch.bfloat16} if SEVERAL else {}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16, **storage,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        )
    model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, Params4bit):
                room = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                made = Params4bit(room, requires_grad=False, **{k: getattr(parameter, k) for k in _KEPT}, module=module)
                setattr(module, name, made._quantize(torch.device("cuda")))
            else:
                room = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                setattr(module, name, torch.nn.Parameter(room))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cuda"))
    model.tie_weights()
    model.is_loaded_in_4bit = model.is_quantized = True
    model.config.quantization_config = quantization
    return model


_KEPT = ("blocksize", "compress_statistics", "quant_type", "quant_storage")


def main(job: dict[str, Any]) -> None:
    length, batch, quantized = job["seq_len"], job["per_device_train_batch_size"], job["method"] == "qlora"
    rows = Dataset.from_dict({name: [[3] * length] * (batch * STEPS * 2) for name in ("input_ids", "labels")})
    rows = rows.add_column("attention_mask", [[1] * length] * len(rows))
    arguments = SFTConfig(
        output_dir="output", max_seq_length=length, packing=False, dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=batch, gradient_checkpointing=True, max_steps=STEPS, save_strategy="no", report_to=[],
        weight_decay=0.01, warmup_steps=10, adam_epsilon=1e-4, lr_scheduler_type="linear", logging_steps=10,
        bf16=quantized, optim="adamw_torch", skip_memory_metrics=False, include_tokens_per_second=True,
        **({"fsdp": "full_shard auto_wrap", "fsdp_config": {"backward_prefetch": "backward_pre"}} if SEVERAL else {}),
    )  # fmt: skip
    model = in_4_bits(job["config"]) if quantized else built(job["config"])
    adapter = None
    if "r" in job:
        adapter = LoraConfig(
            r=job["r"], lora_alpha=16, lora_dropout=job["lora_dropout"], target_modules=job["target_modules"], task_type="CAUSAL_LM"
        )  # fmt: skip
    if quantized:  # the plugin's own preparation casts nothing to fp32
        model.requires_grad_(False)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        model, adapter = get_peft_model(model, adapter), None
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator, peft_config=adapter,
        processing_class=tokenizer(job["config"]),
    )  # fmt: skip
    if trainer.is_fsdp_enabled and "r" in job:
        trainer.accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)
    trainer.train()


def tokenizer(config: str) -> Any:
    """A tokenizer of one word, which nothing reads: the rows have token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
