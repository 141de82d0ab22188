"""Measures the gradient of embeddings. Prints one JSON object.

Argument: JSON list of [indices, rows, columns, dtype]. Result by its text: the most bytes that are requested beside the gradient.
"""

import json
import sys

import torch


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def beside_the_gradient(indices: int, rows: int, columns: int, dtype: str) -> int:
    output = torch.empty(indices, columns, device="cuda", dtype=getattr(torch, dtype))
    tokens = torch.empty(indices, device="cuda", dtype=torch.int64)
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    gradient = torch.ops.aten.embedding_dense_backward(output, tokens, rows, -1, False)
    return requested("peak") - before - gradient.nbytes


print("FOUND " + json.dumps({str(each): beside_the_gradient(*each) for each in json.loads(sys.argv[1])}))
