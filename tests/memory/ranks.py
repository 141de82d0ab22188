"""Real processes over gloo on this machine, and the models that their workers build."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
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
    for case in (
        "fsdp1_full", "fsdp1_sharded", "fsdp1_local", "fsdp1flat_full", "fsdp1flat_sharded", "fsdp1flat_local",
        "fsdp2_full", "fsdp2_sharded", "ddp_full",
    )
)  # fmt: skip
"""Cases of checkpoint_worker.py. `fsdp1flat`: FSDP1 without `use_orig_params`."""
MMAP = "65536"
"""glibc returns freed allocations of at least this size to the kernel at once, so that the process's memory equals its live allocations."""


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


def run_ranks(worker: Path, *arguments: str, ranks: int = RANKS, timeout_s: int = 1200) -> str:
    """Run a script whose `main` is called by `as_ranks`. Returns what the ranks print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": MMAP, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(worker), *arguments],
        env=os.environ | shared,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors[-4000:]
    return printed


def as_ranks(main: Callable[[], None]) -> None:
    """Run `main` in forks of this process, one for each rank, and end with status 1 if one fails.

    So the ranks share the imports, which take longer than most of their work.
    """
    children = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        status = 1
        try:
            main()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for _ in children:
        ended, status = os.wait()
        if status:
            for other in children:
                if other != ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
            sys.exit(1)
