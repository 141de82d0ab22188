"""Two steps with DeepSpeed. Arguments: MODEL OUT --deepspeed CONFIG."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)  # DeepSpeed's launcher adds it
parser.add_argument("--deepspeed")
parser.add_argument("model")
parser.add_argument("out")
args = parser.parse_args()

skip_shm_operator()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
model.config.use_cache = False
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=args.deepspeed
)
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
tokens = torch.randint(0, 1000, (engine.train_micro_batch_size_per_gpu(), 16))
losses = []
for _ in range(2):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    losses.append(loss.item())
if rank == 0:
    found = {
        "losses": losses,
        "steps": engine.global_steps,
        "stage": engine.zero_optimization_stage(),
        "world": torch.distributed.get_world_size(),
        "optimizer": type(optimizer.optimizer).__name__,
        "dtype": str(next(model.parameters()).dtype),
    }
    Path(args.out).write_text(json.dumps(found))
torch.distributed.barrier()
os._exit(0)  # DeepSpeed over gloo sometimes aborts during a normal exit
