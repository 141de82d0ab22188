"""Trains a LoRA adapter with accelerate: `accelerate launch --multi_gpu --num_processes 4 examples/lora.py`.

The data are random tokens. The model's weights come from the Hugging Face hub; `fsdp-advisor rehearse --empty-weights` needs none.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

MODEL = "Qwen/Qwen2.5-0.5B"
SEQUENCES, TOKENS, MICRO_BATCH = 4096, 1024, 4


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, TOKENS))
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=MICRO_BATCH))
    model.train()
    for batch in batches:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
