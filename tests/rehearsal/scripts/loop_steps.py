"""The most bytes that PyTorch allocates while an optimizer with a loop of its own trains a model in bf16. Prints one JSON object.

Arguments: module and class of the optimizer, its options as JSON, the options of the group of linear layers as JSON, the path of the
model's config.json, micro-batch, tokens. Adam-mini takes named parameters in place of groups.
"""

import importlib
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

module, name, options, group, path = (
    sys.argv[1],
    sys.argv[2],
    json.loads(sys.argv[3]),
    json.loads(sys.argv[4]),
    sys.argv[5],
)
batch, tokens = int(sys.argv[6]), int(sys.argv[7])
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
model.config.use_cache = False
linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)] if group else []
others = [p for p in model.parameters() if all(p is not weight for weight in linear)]
groups = [{"params": others}, *([{"params": linear} | group] if linear else [])]
made = getattr(importlib.import_module(module), name)
optimizer = made(list(model.named_parameters()) if name == "Adam_mini" else groups, lr=1e-3, **options)
ids = torch.zeros(batch, tokens, dtype=torch.long, device="cuda")
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("FOUND " + json.dumps({"allocated": torch.cuda.max_memory_allocated()}))
