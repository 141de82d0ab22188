"""Write the snapshots in data/. PyTorch itself makes them for a small Llama or GPT-2 on a simulated GPU.

    python tests/diagnosis/make_snapshots.py NAME OUTPUT

needs PyTorch's CUDA build and transformers (fsdp_advisor/rehearsal/README.md). CASES has the GPU's memory of each file. Paths are
shortened, so that files do not name the machine that made them. `checkpointing_torch26` is `checkpointing` with torch 2.6.0 and
transformers 4.57.
"""

from __future__ import annotations

import gzip
import os
import pickle
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.rehearsal.environment import environment


@dataclass(frozen=True)
class Case:
    """A run: the GPU's bytes (None: enough), the number of steps, the recorded stacks, and whether it shards and checkpoints."""

    gpu_bytes: int | None
    steps: int
    stacks: str
    sharded: bool = False
    checkpointing: bool = False
    gpt2: bool = False


CASES = {
    "steps": Case(None, 2, "python"),
    "loss_oom": Case(985_991_616, 1, "python"),
    "fsdp2_forward_oom": Case(722_991_616, 1, "all", sharded=True),
    "checkpointing": Case(None, 2, "python", sharded=True, checkpointing=True),
    "gpt2": Case(None, 2, "python", sharded=True, gpt2=True),
}
LAYERS = 3


def model_of(case: Case) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    if not case.sharded:
        torch.set_default_dtype(torch.bfloat16)
        return LlamaForCausalLM(config).to("cuda")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model = GPT2LMHeadModel(GPT2Config()) if case.gpt2 else LlamaForCausalLM(config)
    layers = model.transformer.h if case.gpt2 else model.model.layers
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def train(case: Case, model: Any, optimizer: Any) -> None:
    import torch

    for _ in range(case.steps):
        tokens = torch.zeros(1 if case.gpt2 else 8, 1024, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shortened(value: Any) -> None:
    """Shorten the paths in a snapshot, in place: frames are shared between stacks."""
    for frame in {id(f): f for stack in stacks_of(value) for f in stack}.values():
        name = re.sub(r".*/site-packages/", "/venv/lib/python3.11/site-packages/", frame["filename"])
        name = re.sub(r".*/(Python-[\d.]+)/", r"/python/", name)
        frame["filename"] = re.sub(r".*/(sitecustomize|make_snapshots)\.py", r"/job/\1.py", name).replace(
            Path(__file__).stem, "train"
        )


def stacks_of(snapshot: Any) -> Any:
    yield from (event.get("frames", []) for trace in snapshot["device_traces"] for event in trace)
    yield from (block["frames"] for segment in snapshot["segments"] for block in segment["blocks"])
    yield from (segment["frames"] for segment in snapshot["segments"])


def simulate(case: Case) -> None:
    """Run this script again in the environment of a simulated GPU."""
    memory = {} if case.gpu_bytes is None else {"REHEARSAL_TOTAL_BYTES": str(case.gpu_bytes)}
    variables = environment(Path(sys.executable), find_gpu("A100-40GB"), 1, outside={**os.environ, **memory})
    os.execve(sys.executable, [sys.executable, *sys.argv], variables)


def main() -> None:
    case, output = CASES[sys.argv[1]], Path(sys.argv[2])
    if "REHEARSAL_DEVICES" not in os.environ:
        simulate(case)  # before torch is imported
    import torch

    torch.cuda.memory._record_memory_history(stacks=case.stacks)
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        train(case, model, optimizer)
    except torch.OutOfMemoryError as error:
        print(error)
    torch.cuda.memory._dump_snapshot(str(output))
    snapshot = pickle.loads(output.read_bytes())
    shortened(snapshot)
    output.write_bytes(gzip.compress(pickle.dumps(snapshot), mtime=0))
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
