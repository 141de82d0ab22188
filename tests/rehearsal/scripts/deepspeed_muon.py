"""Measures the temporaries of DeepSpeed's Muon for gradients of the given shapes and dtype. Prints one JSON object.

Arguments: JSON of a list of shapes, and the dtype. Result by shape: the most bytes that a later update of it allocates at a
time. Each shape has its own graph, as the first shape of a job.
"""

import json
import sys

import torch
from deepspeed.runtime.zero.muon.original_muon import muon_update

DTYPE = getattr(torch, sys.argv[2])
WORKSPACE = torch.mm(*[torch.ones(8, 8, device="cuda", dtype=torch.float16)] * 2)  # cuBLAS keeps its own


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def temporaries(shape: list[int]) -> int:
    torch._dynamo.reset()
    gradient = torch.ones(shape, device="cuda", dtype=DTYPE)
    momentum = torch.zeros_like(gradient)
    muon_update(gradient, momentum)  # compiles
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    muon_update(gradient, momentum)
    return requested("peak") - before


print("FOUND " + json.dumps({str(shape): temporaries(shape) for shape in json.loads(sys.argv[1])}))
