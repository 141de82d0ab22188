"""Measures the allocations of optimizers for tensors of the given shapes. Prints one JSON object.

Arguments: JSON of {name: [module, class, options, shapes]}, and the number of ranks over which FSDP2 shards the tensors. Result by name:
bytes of the state that PyTorch allocates, bytes of the paged state, and the most bytes that the second step allocates in addition. For
torchao's CPUOffloadOptimizer also the bytes of pinned tensors and of states on the host.
"""

import gc
import importlib
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = int(sys.argv[2])
if RANKS > 1:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    MESH = init_device_mesh("cuda", (RANKS,))
WORKSPACE = torch.mm(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))  # cuBLAS keeps its own


def requested(what: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def tensor(shape: list[int]) -> torch.Tensor:
    whole = torch.zeros(shape, device="cuda")
    return distribute_tensor(whole, MESH, [Shard(0)]) if RANKS > 1 else whole


def stepped(module: str, name: str, options: dict[str, object], shapes: list[list[int]]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(tensor(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = tensor(parameter.shape)
    torch._dynamo.reset()
    gc.collect()
    before = requested("current")
    optimizer = getattr(importlib.import_module(module), name)(parameters, lr=1e-3, **options)
    offloads = name == "CPUOffloadOptimizer"
    copy_gradients(parameters, offloads=offloads)
    optimizer.step()
    kept = requested("current")
    copy_gradients(parameters, offloads=offloads)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    tensors = [] if offloads else tensors_of(optimizer)
    on_gpu = {
        "state": kept - before,
        "paged": sum(t.nbytes for t in tensors if getattr(t, "is_paged", False)),
        "temporaries": requested("peak") - kept,
    }
    return on_gpu | (on_host(optimizer) if offloads else {})


def copy_gradients(parameters: list[torch.nn.Parameter], *, offloads: bool) -> None:
    """Run a backward that adds to the gradients, after which CPUOffloadOptimizer copies them to the host."""
    if offloads:
        torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def on_host(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    copies = [tensor for p in optimizer.param_d2h_map.values() for tensor in (p, p.grad)]
    states = [tensor for each in optimizer.optim_dict.values() for tensor in tensors_of(each)]
    return {"pinned": sum(t.nbytes for t in copies), "states on the host": sum(t.nbytes for t in states)}


print("FOUND " + json.dumps({name: stepped(*each) for name, each in json.loads(sys.argv[1]).items()}))
