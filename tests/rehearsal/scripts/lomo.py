"""The most bytes that PyTorch allocates while LOMO or AdaLomo trains a model in bf16. Prints one JSON object.

Arguments: the class in lomo_optim, the path of the model's config.json, micro-batch, tokens.
"""

import json
import sys

import lomo_optim
import torch
from transformers import AutoConfig, AutoModelForCausalLM

name, path, batch, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
model.config.use_cache = False
optimizer = getattr(lomo_optim, name)(model, lr=1e-3)
ids = torch.zeros(batch, tokens, dtype=torch.long, device="cuda")
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.fused_backward(loss, 1e-3)
    del loss
print("FOUND " + json.dumps({"allocated": torch.cuda.max_memory_allocated()}))
