"""Ranks on several nodes, and ranks started by torchrun or srun. Two nodes are two commands on this machine."""

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
from matrix import in_turn, taken, with_all_cases
from tiny_model import CONFIG

pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # after the check for torch
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.validation import measure, modes, rank
from fsdp_advisor.validation.engines import fake_process_group, mesh_of
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.process_tree import descendants
from fsdp_advisor.validation.records import Record, read

pytestmark = pytest.mark.slow

VALIDATE = ["-m", "fsdp_advisor", "validate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"]
FAILING_RANK = """
import os, signal, sys, threading, time

def wait():
    while not hasattr(sys.modules.get("fsdp_advisor.validation.real"), "steady_step"):
        time.sleep(0.005)
    real = sys.modules["fsdp_advisor.validation.real"]
    def take_step(*_):
        if os.environ["FAILURE"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise real.torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.50 GiB is free."
        )
    real.take_step = take_step

if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID")) == "1":
    threading.Thread(target=wait, daemon=True).start()
"""
"""A sitecustomize module with which rank 1 fails in its first step."""


class Cluster:
    """A model, a free port for the rendezvous, and a file for the records."""

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
        size = ["--micro-batch-size", "2", "--seq-len", "64", "--attention", "eager", "--timeout", "300"]
        return [*VALIDATE, "--model", str(self.folder), *asked, *size, "--json", "--records", str(self.records)]

    def start(self, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", **environment}
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**kept, **settings},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background process ignores it otherwise
        )  # fmt: skip

    def srun(self, arguments: list[str], **environment: str) -> list[subprocess.Popen[str]]:
        """A step of two tasks on two nodes, with the variables that srun of Slurm 22.05 sets."""
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_LOCALID": "0",
        }
        step |= {"MASTER_PORT": str(self.port), **environment}
        command = [sys.executable, *arguments]
        return [self.start(command, **step, SLURM_PROCID=str(n), SLURM_NODEID=str(n)) for n in range(2)]

    def failing_rank(self, what: str) -> dict[str, str]:
        """Environment variables with which rank 1 fails."""
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(FAILING_RANK)
        return {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]), "FAILURE": what}

    def only_record(self) -> Record:
        found, notes = read(self.records)
        assert len(found) == 1 and not notes
        return found[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit status, standard output and standard error of each process. None is left running."""
    try:
        return [(one.wait(), out, err) for one in processes for out, err in [one.communicate(timeout=1200)]]
    finally:
        for one in processes:
            one.kill()


def shown_once(ended: list[tuple[int, str, str]]) -> Any:
    assert [status for status, _, _ in ended] == [0] * len(ended), ended
    (shown,) = [out for _, out, _ in ended if out.strip()]
    return json.loads(shown)


@in_turn(2, of=5)  # the day before, test_measure.py measures on two ranks
@pytest.mark.parametrize(("strategy", "per_node"), taken([("zero3", 1)], [("hsdp", 2)]))
def test_two_nodes_meet_and_the_one_with_rank_0_writes_the_record(
    cluster: Cluster, strategy: str, per_node: int
) -> None:
    command = [sys.executable, *cluster.job(strategy, 2 * per_node, 2), "--rdzv-endpoint", cluster.endpoint]
    ended = ends([cluster.start(command), cluster.start(command)])
    shown, record = shown_once(ended), cluster.only_record()
    assert shown == record.as_dict()
    assert record.measured["ranks_per_node"] == [per_node] * 2
    assert len(record.measured["by_rank"]["peak_tensor_bytes"]) == 2 * per_node
    assert record.measured["phase_peaks"] == record.predicted["phase_peaks"]  # of HSDP only with a shard degree of 2
    assert record.measured["spread"]["peak_tensor_bytes"] == 0
    assert record.measured["step_seconds"] > 0 and record.fits_really is True
    assert sum("Rank 0 has the record" in err for _, _, err in ended) == 1


@with_all_cases
@pytest.mark.parametrize("nodes", taken([2], [1]))
def test_ranks_of_an_external_torchrun_are_adopted(cluster: Cluster, nodes: int) -> None:
    meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.endpoint}"]
    options = ["--standalone", "--nproc-per-node=2"] if nodes == 1 else [*meet, "--nproc-per-node=1"]
    command = [*TORCHRUN, *options, *cluster.job("zero3", 2, nodes)]
    shown = shown_once(ends([cluster.start(command) for _ in range(nodes)]))
    record = cluster.only_record()
    assert shown["errors"]["peak_tensor_bytes"] == 0 and shown == record.as_dict()
    assert record.measured["ranks_per_node"] == ([2] if nodes == 1 else [1, 1])


@with_all_cases
def test_ranks_of_srun_are_adopted(cluster: Cluster) -> None:
    ended = ends(cluster.srun(cluster.job("zero3", 2, 2)))
    assert shown_once(ended)["measured"]["ranks_per_node"] == [1, 1]
    assert cluster.only_record().errors["peak_tensor_bytes"] == 0
    assert [err.count("mode:") for _, _, err in ended] == [1, 0]


# Failures


@with_all_cases
def test_out_of_memory_on_another_node_is_recorded(cluster: Cluster) -> None:
    ended = ends(cluster.srun(cluster.job("zero3", 2, 2), **cluster.failing_rank("out of memory")))
    record = cluster.only_record()
    assert [status for status, _, _ in ended] == [1, 1] and record.outcome == "oom" and record.fits_really is False
    assert record.message.startswith("rank 1: CUDA out of memory")
    assert (record.detail["asked_bytes"], record.detail["free_bytes"]) == (2 << 30, 3 << 29)
    assert record.predicted["peak_tensor_bytes"] > 0 and "torch" in record.versions


@with_all_cases
def test_killed_rank_ends_both_nodes(cluster: Cluster) -> None:
    command = [sys.executable, *cluster.job("zero3", 2, 2), "--rdzv-endpoint", cluster.endpoint]
    ended = ends([cluster.start(command, **cluster.failing_rank("killed")) for _ in range(2)])
    for status, _, err in ended:
        said = [line for line in err.splitlines() if not line.startswith("note:")]
        assert status == 3 and len(said) == 2 and "its log is" in said[1], err
    assert sum("rank 1 was killed by SIGKILL" in err for _, _, err in ended) == 1
    assert cluster.only_record().outcome == "crash"


@with_all_cases  # test_measure.py interrupts ranks on one node
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_ended_command_leaves_no_process_behind(cluster: Cluster, number: int, status: int) -> None:
    """It is ended while it waits for the other node."""
    one = cluster.start([sys.executable, *cluster.job("zero3", 2, 2), "--rdzv-endpoint", cluster.endpoint])
    until = time.monotonic() + 200
    while not (agents := [pid for pid in descendants(one.pid) if "torch.distributed.run" in command_line(pid)]):
        assert time.monotonic() < until
        time.sleep(0.1)
    one.send_signal(number)
    ((found, out, err),) = ends([one])
    assert found == status and not out and not cluster.records.exists()
    assert number != signal.SIGINT or err.splitlines()[-1] == "fsdp-advisor: interrupted"
    while any(map(command_line, agents)):
        assert time.monotonic() < until
        time.sleep(0.1)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@with_all_cases
def test_missing_node_is_reported(cluster: Cluster) -> None:
    command = [sys.executable, *cluster.job("zero3", 2, 2), "--timeout", "25", "--rdzv-endpoint", cluster.endpoint]
    ((status, out, err),) = ends([cluster.start(command)])
    said = [line for line in err.splitlines() if not line.startswith("note:")]
    assert status == 3 and not out and not cluster.records.exists()
    assert f"did not meet at {cluster.endpoint}" in said[0] and "every node" in said[1] and "its log is" in said[1]


def test_wrong_number_of_ranks_is_refused(cluster: Cluster) -> None:
    ended = ends(cluster.srun(cluster.job("zero3", 4, 2)))
    assert all(
        status == 2 and "gpus 4, but 2 ranks were started" in err and "--gpus 2" in err for status, _, err in ended
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mode", "simulate"], "--mode simulate runs in one process"),
        (["--strategy", "all"], "ranks started by torchrun or srun can run only one"),
    ],
    ids=str,
)
def test_external_ranks_refuse_other_modes_and_several_cases(cluster: Cluster, arguments: list[str], said: str) -> None:
    for status, out, err in ends(cluster.srun([*cluster.job("zero3", 2, 2), *arguments])[:1]):
        assert status == 2 and said in err and not out


@pytest.mark.parametrize("endpoint", ["localhost", "localhost:x", ":29500", "no.such.host.invalid:29500", "a:70000"])
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        measure.check_endpoint(endpoint)
    measure.check_endpoint("127.0.0.1:29500")


def test_lost_rendezvous_is_reported(tmp_path: Path) -> None:
    log = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."
    ended = measure.read_result(tmp_path, 1, log)
    assert ended.outcome == "crash" and "has ended" in ended.message and "own node" in ended.hint


def test_abort_message_of_nccl_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "0"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("noise\n  what():  [Rank 1] Watchdog caught collective operation timeout\n")
    log = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 9)"
    said = measure.read_result(tmp_path, 1, log).message
    assert (
        said
        == "rank 1 was killed by SIGABRT ([Rank 1] Watchdog caught collective operation timeout); the others were ended"
    )


# Placement of ranks


def test_hsdp_shards_within_a_node_and_replicates_across_nodes() -> None:
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


def test_node_and_gpu_of_a_rank() -> None:
    assert (
        rank.node_name({"GROUP_RANK": "1", "SLURM_NODEID": "0"}) == "1" and rank.node_name({"SLURM_NODEID": "3"}) == "3"
    )
    assert rank.node_name({}) == socket.gethostname()
    for local, gpus in ((0, 0), (4, 4)):
        with pytest.raises(ModeUnavailable, match=f"local rank {local}"):
            rank.gpu_index(local, gpus)


def test_external_ranks_are_measured_unless_another_mode_is_requested() -> None:
    (plan,) = plans(make_request({"model": "gpt2", "strategy": "zero3", "gpus": 16}), seq_len=64)
    assert modes.choose_mode(plan, several_processes=True).mode == "measure"
    assert modes.choose_mode(plan, None, "cpu", several_processes=True).device == "cpu"
    with pytest.raises(UsageError, match="one process"):
        modes.choose_mode(plan, "stand-in", several_processes=True)
