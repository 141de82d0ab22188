"""Several ranks of one rehearsal: collectives between processes, ranks that fail, and ranks that run alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, with_all_cases
from warm_process import Warm

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.memory.device import communicator_range
from fsdp_advisor.rehearsal.environment import environment, machine_of

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "jobs"
NODE = 4
Run = Callable[..., str]


@pytest.fixture
def run(rehearsal_python: Path) -> Run:
    """A function that runs a command of the rehearsal's environment on a simulated node and returns what it prints."""
    programs = rehearsal_python.parent

    def start(program: str, *words: str, gpu: str = "A100-80GB", gpus: int = NODE, **variables: str) -> str:
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        simulated = {**environment(rehearsal_python, find_gpu(gpu), gpus), "PATH": path, **variables}
        done = subprocess.run(
            [programs / program, *words], env=simulated, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


def peaks(printed: str) -> dict[int, dict[str, Any]]:
    """What each rank prints. Lines of several ranks can run together."""
    found = [json.loads(text) for text in re.findall(r"\{\"rank.*?\}", printed)]
    return {each["rank"]: each for each in found}


@in_turn(1, of=3)
def test_collectives_of_four_ranks_return_what_gloo_returns_and_pipelines_run(warm: Warm, tmp_path: Path) -> None:
    printed = warm.run_ranks(str(JOBS / "collectives.py"), (), tmp_path, NODE)
    assert printed.count("equal") == NODE


@in_turn(3, of=6)
def test_ranks_that_call_different_collectives_and_a_rank_that_ends_are_reported(run: Run) -> None:
    started = time.monotonic()
    printed = run("torchrun", "--nproc-per-node=3", str(JOBS / "failing.py"))
    assert printed.count("calls all-reduce of 8 bytes") == 3
    assert printed.count("rank 2 has ended") == 2
    assert time.monotonic() - started < 120


@with_all_cases
def test_ranks_together_one_rank_alone_and_a_fake_process_group_have_the_same_peaks(run: Run) -> None:
    words = [f"--nproc-per-node={NODE}", str(JOBS / "fsdp2.py"), "tp"]
    together = peaks(run("torchrun", *words))
    alone = peaks(run("torchrun", *words, REHEARSAL_RANKS="0"))
    fake = peaks(run("python", str(JOBS / "fsdp2.py"), "tp", "fake", RANK="0", WORLD_SIZE=str(NODE)))
    assert sorted(together) == list(range(NODE))
    assert sorted(alone) == sorted(fake) == [0]
    for each in (together[0], alone[0]):
        assert (each["allocated"], each["reserved"]) == (fake[0]["allocated"], fake[0]["reserved"])
    assert together[3]["answers"] == [0, 1, 2, 3]
    assert alone[0]["answers"] == [0, 0, 0, 0], "the other ranks have this rank's data"
    assert together[0]["sum_on_cpu"] == alone[0]["sum_on_cpu"] == NODE


@with_all_cases
def test_ranks_of_1024_train_and_save_alone(run: Run, tmp_path: Path) -> None:
    job = {"FOLDER": str(tmp_path), "REHEARSAL_WORLD_SIZE": "1024", "REHEARSAL_GPUS_PER_NODE": str(NODE)}
    launch = ["--nnodes=256", f"--nproc-per-node={NODE}", "--rdzv-backend=c10d", "--rdzv-endpoint=elsewhere:29500"]
    found = peaks(run("torchrun", *launch, str(JOBS / "fsdp2.py"), REHEARSAL_RANKS="0,777", **job))
    assert sorted(found) == [0, 777]
    assert found[777]["answers"] == [777] * 4
    assert (tmp_path / "0" / ".metadata").exists(), "rank 0 saves the checkpoint of all ranks"
    fake = peaks(run("python", str(JOBS / "fsdp2.py"), "fake", RANK="0", WORLD_SIZE="1024"))
    assert found[0]["allocated"] == fake[0]["allocated"]


@with_all_cases
def test_broadcasts_from_all_ranks_in_one_group_are_an_all_gather_for_a_rank_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gather.py").write_text("""
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
gathered = [torch.full((2,), 7 if rank == 0 else 0, device="cuda") for rank in range(4)]
with dist._coalescing_manager(device=torch.device("cuda", 0)):
    for rank in range(4):
        dist.broadcast(gathered[rank], rank)
print([each.tolist() for each in gathered])
""")
    printed = run("torchrun", "--nproc-per-node", "4", str(tmp_path / "gather.py"), REHEARSAL_RANKS="0")
    assert "[[7, 7], [7, 7], [7, 7], [7, 7]]" in printed


@in_turn(2, of=4)
def test_deepspeed_starts_one_rank_alone(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, deepspeed\ndeepspeed.init_distributed()\n"
        "print(sys.argv[1:], os.environ['RANK'], deepspeed.comm.get_world_size(), flush=True)\n"
    )
    printed = run("deepspeed", f"--num_gpus={NODE}", str(script), "--stage", "3", REHEARSAL_RANKS="2")
    assert f"['--local_rank=2', '--stage', '3'] 2 {NODE}" in printed


@in_turn(1, of=2)
def test_a_script_that_starts_its_own_ranks_is_refused(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.multiprocessing as mp\n"
        "try:\n    mp.spawn(print, nprocs=2)\nexcept RuntimeError as error:\n    print(error)\n"
    )
    assert "start it with torchrun" in run("python", str(script), REHEARSAL_RANKS="0")


def test_a_communicator_grows_with_its_ranks() -> None:
    gpu = find_gpu("H100-80GB")
    assert machine_of(gpu, 8).communicator_bytes == sum(communicator_range(gpu, 8)) // 2
    assert 0 < sum(communicator_range(gpu, 1)) < sum(communicator_range(gpu, 8)) < sum(communicator_range(gpu, 16, 2))
    assert machine_of(gpu, 8, nnodes=2).communicator_bytes == sum(communicator_range(gpu, 16, 2)) // 2
