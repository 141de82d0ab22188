"""What optimizers that loop over the parameters in Python allocate. Prints one JSON object.

Argument: JSON of {name: [module, class, options, tensors]}. Each of the tensors is [name, shape, dtype, options of its group]. Result by
name: bytes of the state, and the most bytes that the fourth step allocates in addition, which renews projections.
"""

import gc
import importlib
import json
import sys

import torch

WORKSPACES = [torch.mm(*[torch.ones(8, 8, device="cuda", dtype=d)] * 2) for d in (torch.float32, torch.bfloat16)]


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def stepped(module: str, name: str, options: dict[str, object], tensors: list[list[object]]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.zeros(s, device="cuda", dtype=getattr(torch, d))) for _, s, d, _ in tensors]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    before = requested("current")
    groups = [{"params": [p]} | group for p, (*_, group) in zip(parameters, tensors, strict=True)]
    optimizer = getattr(importlib.import_module(module), name)(groups, lr=1e-3, **options)
    for _ in range(3):
        optimizer.step()
    kept = requested("current")
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    return {"state": kept - before, "temporaries": requested("peak") - kept}


print("FOUND " + json.dumps({name: stepped(*each) for name, each in json.loads(sys.argv[1]).items()}))
