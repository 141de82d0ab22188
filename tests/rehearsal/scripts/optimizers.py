"""What optimizers allocate for tensors of the given shapes. Prints one JSON object.

Arguments: JSON of {name: [module, class, options]}, JSON of shapes. Result by name: bytes of the state that PyTorch allocates, bytes of
the paged state, and the most bytes that the second step allocates in addition.
"""

import importlib
import json
import sys

import torch

SHAPES = json.loads(sys.argv[2])


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def stepped(module: str, name: str, options: dict[str, object]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    before = requested("current")
    optimizer = getattr(importlib.import_module(module), name)(parameters, lr=1e-3, **options)
    optimizer.step()
    kept = requested("current")
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {
        "state": kept - before,
        "paged": sum(t.nbytes for t in tensors if getattr(t, "is_paged", False)),
        "temporaries": requested("peak") - kept,
    }


print("FOUND " + json.dumps({name: stepped(*each) for name, each in json.loads(sys.argv[1]).items()}))
