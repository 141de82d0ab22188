"""A small Llama under FSDP2, and with `tp` tensor parallelism over two ranks. Prints the rank's peaks as JSON.

`fake`: one process with PyTorch's fake process group in place of NCCL. SHAPE: width, layers, vocabulary, tokens.
FOLDER: where to save a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
D, L, V, T = (int(word) for word in os.environ.get("SHAPE", "256,4,1000,128").split(","))
HEAD = 32 if D < 4096 else 128
FF = 2 * D if D < 4096 else D * 7 // 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        narrow = max(HEAD, D // 8)  # grouped-query attention with 8 queries per key
        self.q, self.k, self.v = (nn.Linear(D, width, bias=False) for width in (D, narrow, narrow))
        self.o, self.gate, self.up = (nn.Linear(D, width, bias=False) for width in (D, FF, FF))
        self.down, self.norm1, self.norm2 = nn.Linear(FF, D, bias=False), nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (each(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(V, D), nn.Linear(D, V, bias=False), nn.RMSNorm(D)
        self.layers = nn.ModuleList(Layer() for _ in range(L))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def join() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "fake" in sys.argv:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))


def sharded() -> Llama:
    with torch.device("meta"):
        model = Llama()
    mesh = init_device_mesh("cuda", (RANKS,))
    if "tp" in sys.argv:
        both = init_device_mesh("cuda", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        for layer in model.layers:
            styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, both["tp"], styles)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model.to_empty(device="cuda")


def main() -> None:
    join()
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        tokens = torch.randint(0, V, (1, T)).cuda()
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        if "tp" not in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    answers: list[object] = [RANK]
    if "fake" not in sys.argv:
        answers = [None] * RANKS
        dist.all_gather_object(answers, RANK)
        on_cpu = torch.tensor([1.0])
        dist.all_reduce(on_cpu)
        peaks["sum_on_cpu"] = int(on_cpu.item())
        dist.barrier()
    if "FOLDER" in os.environ:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{os.environ['FOLDER']}/{RANK}")
    dist.destroy_process_group()
    sys.stdout.write(json.dumps({"rank": RANK, **peaks, "answers": answers[:4]}) + "\n")


main()
