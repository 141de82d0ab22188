"""Replacements for launchers, used if only some ranks of the job run, or all ranks of several nodes run on this machine.

The launcher's rendezvous between nodes is skipped, because this machine has all nodes. Each rank gets the environment variables of the
whole job.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.rehearsal.inside.ranks import RANKS, selected_ranks

WORLD_SIZE = "REHEARSAL_WORLD_SIZE"
GPUS_PER_NODE = "REHEARSAL_GPUS_PER_NODE"
_POLL_SECONDS = 0.05


def starts_all_nodes() -> bool:
    """Whether this machine simulates several nodes, so that the launcher must start the ranks of all nodes."""
    return int(os.environ.get(WORLD_SIZE) or 0) > int(os.environ.get(GPUS_PER_NODE) or 0)


def answer_torchrun(api: Any) -> None:
    """Replace launch_agent of torch.distributed.launcher.api, which torchrun and `accelerate launch` call."""

    def launch_agent(config: Any, entrypoint: Any, args: Sequence[Any], **others: Any) -> dict[int, Any]:
        if not isinstance(entrypoint, str):
            raise RuntimeError(
                f"with --ranks, a rehearsal starts scripts, not functions such as {entrypoint!r}: {_USE}"
            )
        command = [entrypoint, *map(str, args)]
        status = start_ranks(lambda _: command, config.nproc_per_node * config.min_nodes, config.nproc_per_node)
        if status:
            sys.exit(status)
        return {}

    api.launch_agent = launch_agent


def answer_deepspeed(runner: Any) -> None:
    """Replace main of deepspeed.launcher.runner, which the command `deepspeed` calls.

    Source: deepspeed/launcher/launch.py (0.19.8), main: the command of a rank.
    """

    def main(args: Any = None) -> None:
        found = runner.parse_args(args)
        python = [] if found.no_python else [sys.executable, "-u", *(["-m"] if found.module else [])]

        def command(local_rank: int) -> list[str]:
            given = [] if found.no_local_rank else [f"--local_rank={local_rank}"]
            return [*python, found.user_script, *given, *found.user_args]

        per_node = found.num_gpus if found.num_gpus > 0 else int(os.environ.get("REHEARSAL_DEVICES", "1"))
        sys.exit(start_ranks(command, per_node * max(1, found.num_nodes), per_node))

    runner.main = main


def refuse_spawn(spawn: Any) -> None:
    """Replace start_processes of torch.multiprocessing.spawn: a script that starts its own ranks cannot run one of them."""

    def start_processes(*arguments: Any, **named: Any) -> None:
        raise RuntimeError(f"with --ranks, a script cannot start its own processes with torch.multiprocessing: {_USE}")

    spawn.start_processes = start_processes


_USE = "start it with torchrun, accelerate launch or deepspeed, or rehearse all ranks"


def start_ranks(command: Any, world_size: int, per_node: int) -> int:
    """Start the selected ranks (or all), wait for them, and return the first exit status that is not 0.

    `command(local_rank)` is the command of a rank. `world_size` and `per_node` are the launcher's; the rehearsal's own have precedence.
    The other ranks are ended when one fails.
    """
    world_size = int(os.environ.get(WORLD_SIZE) or world_size)
    per_node = min(int(os.environ.get(GPUS_PER_NODE) or per_node), world_size)
    ranks = selected_ranks() or range(world_size)
    beyond = [rank for rank in ranks if not 0 <= rank < world_size]
    if beyond:
        raise RuntimeError(f"{RANKS} names rank {beyond[0]}, but the job has the ranks 0 to {world_size - 1}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes = []
    try:
        port = free_port()
        for rank in ranks:
            variables = {**os.environ, **variables_of(rank, world_size, per_node, port)}
            processes.append(subprocess.Popen(command(rank % per_node), env=variables))
        return _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        states = [process.poll() for process in processes]
        failed = [state for state in states if state]
        if failed or None not in states:
            return (failed[0] if failed[0] > 0 else 128 - failed[0]) if failed else 0
        time.sleep(_POLL_SECONDS)


def free_port() -> int:
    """A port of this machine for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables_of(rank: int, world_size: int, per_node: int, port: int) -> Mapping[str, str]:
    """The environment variables of one rank of the whole job, as torchrun and DeepSpeed set them.

    Source: torch.distributed.elastic.agent.server.local_elastic_agent (torch 2.13), LocalElasticAgent._start_workers;
    deepspeed/launcher/launch.py (0.19.8), main.
    """
    nodes = -(-world_size // per_node)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node), "LOCAL_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node), "GROUP_WORLD_SIZE": str(nodes),
        "CROSS_RANK": str(rank // per_node), "CROSS_SIZE": str(nodes),
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world_size), "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": f"rehearsal-{port}",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
