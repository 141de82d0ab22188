"""Two steps with accelerate, under the configuration that launched it. Arguments: MODEL OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import cpu_as_gpu  # noqa: F401
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.config.use_cache = False
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 1000, (8, 16))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=2))
losses = []
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
layers = [m for m in model.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
wrappers = [m for m in model.modules() if type(m).__name__.endswith("CheckpointWrapper")]
if accelerator.is_main_process:
    found = {
        "losses": losses,
        "distributed_type": accelerator.distributed_type.value,
        "world": accelerator.num_processes,
        "stage": model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None,
        "wrapped_layers": sum(isinstance(m, FSDPModule) for m in (wrappers or layers)),
        "checkpointed_layers": len(wrappers),
        "local": sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters()),
        "whole": sum(p.numel() for p in model.parameters()),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
accelerator.wait_for_everyone()
os._exit(0)  # DeepSpeed over gloo sometimes aborts during a normal exit
