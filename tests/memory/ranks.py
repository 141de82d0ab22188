"""Two real processes over gloo on this machine, and the models that their workers build."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from fsdp_advisor.model.profile import Parameter, Profile, Run, Stack, Unit

RANKS = 2
LOADED = (
    "every_rank", "every_rank_mapped", "cpu_ram_efficient_loading", "fsdp2_rank0", "fsdp2_sharded", "fsdp2_every_rank",
    "fsdp2_scattered", "fsdp1_rank0", "fsdp1_without_device_id",
)  # fmt: skip
SAVED = (
    "save_fsdp1_full", "save_fsdp1_full_on_every_rank", "save_fsdp1_sharded", "save_fsdp1_local",
    "save_fsdp2_full", "save_fsdp2_sharded", "save_ddp_save_pretrained", "save_ddp_full",
)  # fmt: skip
RESUMABLE = tuple(
    f"save_{case}_resumable"
    for case in ("fsdp1_full", "fsdp1_sharded", "fsdp1_local", "fsdp2_full", "fsdp2_sharded", "ddp_full")
)
"""Cases of checkpoint_worker.py."""
MMAP = "65536"
"""glibc gives allocations of this size back to the kernel at once, so that memory of a process is what it holds."""


def llama(
    hidden: int,
    width: int,
    layers: int,
    vocabulary: int,
    *,
    tied: bool = False,
    config: dict[str, object] | None = None,
) -> Profile:
    """The inventory of a llama without grouped heads."""
    square = (hidden, hidden)
    layer = Unit(
        "LlamaDecoderLayer",
        (
            *(Parameter(f"self_attn.{x}_proj.weight", square) for x in "qkvo"),
            *(Parameter(f"mlp.{x}_proj.weight", (width, hidden)) for x in ("gate", "up")),
            Parameter("mlp.down_proj.weight", (hidden, width)),
            Parameter("input_layernorm.weight", (hidden,), role="norm"),
            Parameter("post_attention_layernorm.weight", (hidden,), role="norm"),
        ),
    )
    ties = ("lm_head.weight",) if tied else ()
    embedding = Parameter("model.embed_tokens.weight", (vocabulary, hidden), tied=ties, role="embedding")
    norm = Parameter("model.norm.weight", (hidden,), role="final_norm")
    head = () if tied else (Parameter("lm_head.weight", (vocabulary, hidden), role="head"),)
    root = Unit("LlamaForCausalLM", (embedding, norm, *head))
    stack = Stack("model.layers", (layer,), (Run((0,), layers),))
    return Profile("llama", "causal-lm", root, (stack,), (1,), None, config or {}, {})


def run_ranks(worker: Path, *arguments: str, timeout_s: int = 280) -> None:
    """Run `worker` as two ranks; an error shows the first rank's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": MMAP, "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [process.communicate(timeout=timeout_s)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(e[-2000:] for e in errors)
