"""The peak of steady steps under accelerate's FSDP2 plugin, which checkpoints layers and offloads their inputs to host memory.

Arguments: the model's configuration, as JSON, micro-batch and length.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    config, batch, length = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True, activation_checkpointing_offload=True,
    )  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    tokens = torch.zeros(batch, length, dtype=torch.long, device=accelerator.device)
    peak = 0
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        accelerator.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, torch.cuda.max_memory_allocated()) if step > 1 else 0
    print(json.dumps({"rank": int(os.environ["RANK"]), "allocated": peak}), flush=True)


if __name__ == "__main__":
    main()
