"""Ranks on several nodes, and ranks that torchrun or srun has started: two nodes are two commands on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # after the check for torch
from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.plan import plans
from fsdp_advisor.validation import measure, modes, rank
from fsdp_advisor.validation.child_process import descendants
from fsdp_advisor.validation.engines import fake_process_group, mesh_of
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.records import Record, read

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
VALIDATE = ["-m", "fsdp_advisor", "validate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"]
TROUBLE = """
import os, signal, sys, threading, time

def wait():
    while not hasattr(sys.modules.get("fsdp_advisor.validation.real"), "figures"):
        time.sleep(0.005)
    real = sys.modules["fsdp_advisor.validation.real"]
    def take_step(*_):
        if os.environ["TROUBLE"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise real.torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.50 GiB is free."
        )
    real.take_step = take_step

if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID")) == "1":
    threading.Thread(target=wait, daemon=True).start()
"""
"""As sitecustomize: rank 1 comes to grief in its first step."""


class Ground:
    """A model, a place for ranks to meet, and a file for their records."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records = folder, folder / "records.jsonl"
        (folder / "config.json").write_text(json.dumps(CONFIG))
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port: int = one.getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def job(self, strategy: str, gpus: int, nnodes: int) -> list[str]:
        asked = ["--device", "cpu", "--strategy", strategy, "--gpus", str(gpus), "--nnodes", str(nnodes)]
        size = ["--micro-batch-size", "2", "--seq-len", "64", "--attention", "eager", "--timeout", "100"]
        return [*VALIDATE, "--model", str(self.folder), *asked, *size, "--json", "--records", str(self.records)]

    def start(self, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", **environment}
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**kept, **settings}
        )

    def srun(self, arguments: list[str], **environment: str) -> list[subprocess.Popen[str]]:
        """A step of two tasks on two nodes, with the variables that Slurm 22.05's srun was seen to set."""
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_LOCALID": "0",
        }
        step |= {"MASTER_PORT": str(self.port), **environment}
        command = [sys.executable, *arguments]
        return [self.start(command, **step, SLURM_PROCID=str(n), SLURM_NODEID=str(n)) for n in range(2)]

    def trouble(self, what: str) -> dict[str, str]:
        place = self.folder / "trouble"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(TROUBLE)
        return {"PYTHONPATH": os.pathsep.join([str(place), *filter(None, sys.path)]), "TROUBLE": what}

    def the_record(self) -> Record:
        found, notes = read(self.records)
        assert len(found) == 1 and not notes
        return found[0]


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Status, standard output and standard error of each; none is left running."""
    try:
        return [(one.wait(), out, err) for one in processes for out, err in [one.communicate(timeout=120)]]
    finally:
        for one in processes:
            one.kill()


def shown_once(ended: list[tuple[int, str, str]]) -> Any:
    assert [status for status, _, _ in ended] == [0] * len(ended), ended
    (shown,) = [out for _, out, _ in ended if out.strip()]
    return json.loads(shown)


def test_two_nodes_meet_and_one_has_the_record(ground: Ground) -> None:
    command = [sys.executable, *ground.job("hsdp", 4, 2), "--rdzv-endpoint", ground.endpoint]
    ended = ends([ground.start(command), ground.start(command)])
    shown, record = shown_once(ended), ground.the_record()
    assert shown == record.as_dict()
    assert record.measured["ranks_per_node"] == [2, 2] and len(record.measured["by_rank"]["peak_tensor_bytes"]) == 4
    assert record.measured["phase_peaks"] == record.predicted["phase_peaks"]  # which they are with a shard degree of 2
    assert sum("rank 0 is on another node" in err for _, _, err in ended) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_under_the_user_s_torchrun(ground: Ground, nodes: int) -> None:
    meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={ground.endpoint}"]
    options = ["--standalone", "--nproc-per-node=2"] if nodes == 1 else [*meet, "--nproc-per-node=1"]
    command = [*TORCHRUN, *options, *ground.job("zero3", 2, nodes)]
    shown = shown_once(ends([ground.start(command) for _ in range(nodes)]))
    record = ground.the_record()
    assert shown["errors"]["peak_tensor_bytes"] == 0 and shown == record.as_dict()
    assert record.measured["ranks_per_node"] == ([2] if nodes == 1 else [1, 1])


def test_under_srun(ground: Ground) -> None:
    ended = ends(ground.srun(ground.job("zero3", 2, 2)))
    assert shown_once(ended)["measured"]["ranks_per_node"] == [1, 1]
    assert ground.the_record().errors["peak_tensor_bytes"] == 0
    assert [err.count("rung:") for _, _, err in ended] == [1, 0]


# Trouble


def test_out_of_memory_on_another_node_is_on_record(ground: Ground) -> None:
    ended = ends(ground.srun(ground.job("zero3", 2, 2), **ground.trouble("out of memory")))
    record = ground.the_record()
    assert [status for status, _, _ in ended] == [1, 1] and record.outcome == "oom" and record.fits_really is False
    assert record.message.startswith("rank 1: CUDA out of memory")
    assert (record.detail["asked_bytes"], record.detail["free_bytes"]) == (2 << 30, 3 << 29)
    assert record.predicted["peak_tensor_bytes"] > 0 and "torch" in record.versions


def test_a_rank_that_dies_on_one_node_ends_both(ground: Ground) -> None:
    command = [sys.executable, *ground.job("zero3", 2, 2), "--rdzv-endpoint", ground.endpoint]
    ended = ends([ground.start(command, **ground.trouble("killed")) for _ in range(2)])
    for status, _, err in ended:
        said = [line for line in err.splitlines() if not line.startswith("note:")]
        assert status == 3 and len(said) == 2 and "its log is" in said[1], err
    assert sum("rank 1 was killed by SIGKILL" in err for _, _, err in ended) == 1
    assert ground.the_record().outcome == "crash"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_command_that_is_ended_leaves_nothing_behind(ground: Ground, number: int, status: int) -> None:
    """While it waits for the other node."""
    one = ground.start([sys.executable, *ground.job("zero3", 2, 2), "--rdzv-endpoint", ground.endpoint])
    until = time.monotonic() + 60
    while not (agents := [pid for pid in descendants(one.pid) if "torch.distributed.run" in command_line(pid)]):
        assert time.monotonic() < until
        time.sleep(0.1)
    one.send_signal(number)
    ((found, out, err),) = ends([one])
    assert found == status and not out and not ground.records.exists()
    assert number != signal.SIGINT or err.splitlines()[-1] == "fsdp-advisor: interrupted"
    while any(map(command_line, agents)):
        assert time.monotonic() < until
        time.sleep(0.1)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_node_that_never_comes(ground: Ground) -> None:
    command = [sys.executable, *ground.job("zero3", 2, 2), "--timeout", "8", "--rdzv-endpoint", ground.endpoint]
    ((status, out, err),) = ends([ground.start(command)])
    said = [line for line in err.splitlines() if not line.startswith("note:")]
    assert status == 3 and not out and not ground.records.exists()
    assert f"did not meet at {ground.endpoint}" in said[0] and "every node" in said[1] and "its log is" in said[1]


def test_another_number_of_ranks_than_asked_for(ground: Ground) -> None:
    ended = ends(ground.srun(ground.job("zero3", 4, 2)))
    assert all(status == 2 and "gpus 4, not the 2 ranks" in err and "--gpus 2" in err for status, _, err in ended)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rung", "simulate"], "simulate runs in one process"),
        (["--strategy", "all"], "ranks that are started by hand run one"),
    ],
    ids=str,
)
def test_what_ranks_started_by_hand_do_not_run(ground: Ground, arguments: list[str], said: str) -> None:
    for status, out, err in ends(ground.srun([*ground.job("zero3", 2, 2), *arguments])[:1]):
        assert status == 2 and said in err and not out


@pytest.mark.parametrize("endpoint", ["localhost", "localhost:x", ":29500", "no.such.host.invalid:29500", "a:70000"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        measure.check_endpoint(endpoint)
    measure.check_endpoint("127.0.0.1:29500")


def test_a_node_whose_meeting_place_has_gone(tmp_path: Path) -> None:
    log = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."
    ended = measure.ended_with(tmp_path, 1, log)
    assert ended.outcome == "crash" and "has ended" in ended.message and "own node" in ended.hint


def test_what_nccl_said_before_it_ended_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "0"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("noise\n  what():  [Rank 1] Watchdog caught collective operation timeout\n")
    log = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 9)"
    said = measure.ended_with(tmp_path, 1, log).message
    assert (
        said
        == "rank 1 was killed by SIGABRT ([Rank 1] Watchdog caught collective operation timeout); the others were ended"
    )


# Who is where


def test_hsdp_shards_within_a_node_and_replicates_across() -> None:
    request = make_request({"model": "gpt2", "strategy": "hsdp", "gpus": 8, "nnodes": 2})
    (plan,) = plans(request, seq_len=64)
    with fake_process_group(8):
        mesh = mesh_of(plan, "cpu")
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and mesh.mesh_dim_names == ("replicate", "shard")


@pytest.mark.parametrize("nodes", [["0", "1", "0", "1"], ["0", "0", "0", "1"], ["0", "1", "2", "3"]])
def test_ranks_that_do_not_fill_their_nodes_are_refused(nodes: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        rank.ranks_per_node(nodes, 2)
    assert "--distribution=block" in caught.value.hint or caught.value.hint == "--nnodes 4"


def test_a_rank_s_node_and_gpu() -> None:
    assert rank.node({"GROUP_RANK": "1", "SLURM_NODEID": "0"}) == "1" and rank.node({"SLURM_NODEID": "3"}) == "3"
    assert rank.node({}) == socket.gethostname()
    for local, gpus in ((0, 0), (4, 4)):
        with pytest.raises(NotHere, match=f"local rank {local}"):
            rank.gpu_index(local, gpus)


def test_ranks_that_are_there_are_measured() -> None:
    (plan,) = plans(make_request({"model": "gpt2", "strategy": "zero3", "gpus": 16}), seq_len=64)
    assert modes.choose(plan, ranks=True).rung == "measure"
    assert modes.choose(plan, None, "cpu", ranks=True).device == "cpu"
    with pytest.raises(UsageError, match="one process"):
        modes.choose(plan, "stand-in", ranks=True)
