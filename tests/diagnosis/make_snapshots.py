"""Write the snapshots in data/: PyTorch's own, of a small Llama or GPT-2, without a GPU.

    python tests/cuda_without_kernels/run.py --gpu A100-40GB tests/diagnosis/make_snapshots.py NAME OUTPUT

needs PyTorch's CUDA build and transformers (tests/cuda_without_kernels/README.md). STUB_TOTAL_BYTES sets the GPU's memory; CASES
has the one of each file. `checkpointing_torch26` is `checkpointing` with torch 2.6.0 and transformers 4. Paths are shortened, so that files do not name the machine that made them.
"""

from __future__ import annotations

import gzip
import pickle
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Case:
    """A run: its GPU's bytes (None: enough), how many steps, which stacks, and whether it shards and checkpoints."""

    gpu_bytes: int | None
    steps: int
    stacks: str
    sharded: bool = False
    checkpointing: bool = False
    gpt2: bool = False


CASES = {
    "steps": Case(None, 2, "python"),
    "loss_oom": Case(943_000_000, 1, "python"),
    "fsdp2_forward_oom": Case(680_000_000, 1, "all", sharded=True),
    "checkpointing": Case(None, 2, "python", sharded=True, checkpointing=True),
    "gpt2": Case(None, 2, "python", sharded=True, gpt2=True),
}
LAYERS = 3


def model_of(case: Case) -> Any:
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


def train(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> None:
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
        frame["filename"] = re.sub(r".*/(sitecustomize|make_snapshots)\.py", r"/work/\1.py", name).replace(
            Path(__file__).stem, "train"
        )


def stacks_of(snapshot: Any) -> Any:
    yield from (event.get("frames", []) for trace in snapshot["device_traces"] for event in trace)
    yield from (block["frames"] for segment in snapshot["segments"] for block in segment["blocks"])
    yield from (segment["frames"] for segment in snapshot["segments"])


def main() -> None:
    case, output = CASES[sys.argv[1]], Path(sys.argv[2])
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
