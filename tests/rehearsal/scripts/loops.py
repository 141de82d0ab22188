"""Measures the allocations of optimizers that loop over the parameters in Python. Prints one JSON object.

Argument: JSON of {name: [module, class, options, tensors]}. Each of the tensors is [name, shape, dtype, options of its group]. Result by
name: bytes of the state, and the most bytes that the fourth step, which renews projections, allocates in addition. Each step has new
gradients, because an optimizer may replace them. Adam-mini takes named parameters in place of groups.
"""

import gc
import importlib
import itertools
import json
import sys

import torch

WORKSPACES = [torch.mm(*[torch.ones(8, 8, device="cuda", dtype=d)] * 2) for d in (torch.float32, torch.bfloat16)]


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def renew_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def stepped(module: str, name: str, options: dict[str, object], tensors: list[list[object]]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.zeros(s, device="cuda", dtype=getattr(torch, d))) for _, s, d, _ in tensors]
    renew_gradients(parameters)
    gc.collect()
    before = requested("current")
    pairs = zip(parameters, tensors, strict=True)
    groups = [
        {"params": [p for p, _ in each]} | options_of_group
        for options_of_group, each in itertools.groupby(pairs, key=lambda pair: pair[1][3])
    ]
    named = [(tensor_name, p) for p, (tensor_name, *_) in zip(parameters, tensors, strict=True)]
    made = getattr(importlib.import_module(module), name)
    optimizer = made(named if name == "Adam_mini" else groups, lr=1e-3, **options)
    for _ in range(3):
        optimizer.step()
        renew_gradients(parameters)
    kept = requested("current")
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    return {"state": kept - before, "temporaries": requested("peak") - kept}


print("FOUND " + json.dumps({name: stepped(*each) for name, each in json.loads(sys.argv[1]).items()}))
