"""Mode `measure`: real ranks, started by torch.distributed.run, over NCCL on GPUs or over gloo on the CPU.

On the CPU, the live bytes of tensor storages are counted; CUDA's allocator does not exist there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.child_process import Send, preload, run_in_child
from fsdp_advisor.validation.failure_broadcast import JOIN_SECONDS, SEE_OTHER_NODE
from fsdp_advisor.validation.failures import ModeUnavailable, describe_exit
from fsdp_advisor.validation.predict import predict_case
from fsdp_advisor.validation.process_tree import die_with_parent, interrupts_ignored, kill_tree
from fsdp_advisor.validation.rank import RankSettings
from fsdp_advisor.validation.run_result import RunResult

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_RENDEZVOUS_LOST = re.compile(r"RendezvousConnectionError|RendezvousClosedError")
_ABORT_MESSAGE = re.compile(r"(?:what\(\):\s*|DistBackendError: )(.+)")
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def run_on_ranks(case: Case) -> RunResult:
    """Run the case on real ranks. Raises ModeUnavailable before anything starts if this machine has too few GPUs."""
    check(case)
    if case.rdzv_endpoint is not None:
        check_endpoint(case.rdzv_endpoint)
    preload()
    began = time.monotonic()
    predicted = run_in_child(lambda send: _predict(case, send), timeout_seconds=case.time_limit_seconds)
    if predicted.outcome != "ok":
        return predicted
    folder = Path(tempfile.mkdtemp(prefix="fsdp-advisor-"))
    job = {"prediction": predicted.reported["prediction"], "settings": RankSettings.of_case(case).as_dict()}
    (folder / "job.json").write_text(json.dumps(job))
    left = max(1.0, case.time_limit_seconds - (time.monotonic() - began))
    result = run_launcher(folder, launch_command(case, folder, timeout_seconds=left), left)
    several_nodes = case.rdzv_endpoint is not None
    if several_nodes and result.outcome in ("timeout", "crash", "error") and not any(folder.glob("started-*")):
        result = _no_rendezvous(str(case.rdzv_endpoint), min(left, JOIN_SECONDS))
    result = replace(
        result,
        reported={**predicted.reported, **_sent(folder, "versions"), **result.reported},
        detail=result.detail if result.outcome == "ok" else {**result.detail, "log": str(folder)},
        seconds=round(time.monotonic() - began, 3),
        rank_zero_elsewhere=several_nodes and not (folder / "started-0").exists(),
    )
    if result.outcome == "ok":
        shutil.rmtree(folder, ignore_errors=True)
    return result


def check_endpoint(endpoint: str) -> None:
    """Raises UsageError unless `endpoint` is HOST:PORT with a known host. torchrun would retry for minutes."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rdzv-endpoint {endpoint} is not HOST:PORT", hint="for example --rdzv-endpoint node1:29500")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError):
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: the host {host} is unknown here",
            hint="give the name or address of one of the nodes",
        ) from None


def check(case: Case) -> None:
    """Raises ModeUnavailable or UsageError if this machine cannot run the case's ranks."""
    if case.device == "cpu":
        if case.snapshot is not None:
            raise ModeUnavailable("PyTorch records a memory history only on GPUs", hint="omit --snapshot")
        return
    request, needed, available = case.request, _ranks_here(case), machine.gpu_count()
    if not available:
        raise ModeUnavailable(
            "no GPU was found; --mode measure needs one per rank",
            hint="--mode simulate needs none; --device cpu runs real ranks over gloo and counts live bytes",
        )
    if available >= needed:
        return
    if request.nnodes > 1 and case.rdzv_endpoint is None and available >= request.gpus // request.nnodes:
        raise UsageError(
            f"a measurement on {request.nnodes} nodes needs a rendezvous",
            hint="give --rdzv-endpoint HOST:PORT on each node, or run it under torchrun or srun: --sbatch prints an example",
        )
    raise ModeUnavailable(
        f"gpus {request.gpus}, nnodes {request.nnodes}: {needed} ranks on this machine, but it has {available} GPUs",
        hint=f"--gpus {available} measures on the GPUs of this machine; --device cpu runs real ranks over gloo"
        if request.backend == "deepspeed"
        else "--mode stand-in lets one GPU play rank 0 of any world size",
    )


def _ranks_here(case: Case) -> int:
    """The number of ranks on this machine: those of one node if there is a rendezvous, else all, even if the request has several nodes."""
    return case.request.gpus // (case.request.nnodes if case.rdzv_endpoint is not None else 1)


def _predict(case: Case, send: Send) -> None:
    from fsdp_advisor.validation import real

    prediction = predict_case(case)
    send("prediction", prediction.as_dict())
    real.check(prediction.plan, case.device)


def launch_command(case: Case, folder: Path, timeout_seconds: float = JOIN_SECONDS) -> list[str]:
    """The torch.distributed.run command line of a case. The rendezvous id keeps nodes with different cases apart."""
    rendezvous = ["--standalone"]
    if case.rdzv_endpoint is not None:
        identity = json.dumps([case.request.as_dict(), case.device, case.zero1], sort_keys=True)
        rendezvous = [
            f"--nnodes={case.request.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={case.rdzv_endpoint}",
            f"--rdzv-id=fsdp-advisor-{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
            f"--rdzv-conf=join_timeout={math.ceil(min(timeout_seconds, JOIN_SECONDS))}",
        ]
    return [
        sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={_ranks_here(case)}",
        f"--log-dir={folder / 'ranks'}", "--redirects=3", "--monitor-interval=0.1",
        "-m", "fsdp_advisor.validation.rank", str(folder),
    ]  # fmt: skip


def run_launcher(folder: Path, command: list[str], timeout_seconds: float) -> RunResult:
    """Run the launcher and read what its ranks wrote to `folder`. Leaves no rank behind."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    log = folder / "launcher.log"
    own = os.getpid()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
            preexec_fn=lambda: die_with_parent(own),  # the ranks in turn die with the launcher
        )  # fmt: skip
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
            return RunResult(
                outcome="timeout", message=f"it did not end within {timeout_seconds:.0f} s; all ranks were ended"
            )
        except KeyboardInterrupt:
            with interrupts_ignored():
                kill_tree(process.pid)
                process.wait()
            return RunResult(outcome="interrupted", message="interrupted; all ranks were ended")
    return read_result(folder, status, log.read_text(errors="replace"))


def read_result(folder: Path, status: int, log: str) -> RunResult:
    """The result from rank 0's figures, the first failure, or the launcher's log. `status` is the launcher's exit status."""
    failures = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    measured = _sent(folder, "measured")
    if status == 0 and (measured or not failures):
        return RunResult(outcome="ok", reported=measured)
    if failures:
        first = min(failures, key=lambda failure: float(failure["time"]))
        return with_context(RunResult(**{name: value for name, value in first.items() if name != "time"}))
    return _read_launcher_log(folder, status, log)


def _sent(folder: Path, name: str) -> dict[str, Any]:
    """{name: the value that rank 0 sent under this name}; empty if it sent none."""
    path = folder / f"{name}.json"
    return {name: json.loads(path.read_text())} if path.exists() else {}


def _read_launcher_log(folder: Path, status: int, log: str) -> RunResult:
    """The failure of a rank that could not write it to a file, read from the launcher's log."""
    if _PORT_TAKEN.search(log):
        return _port_taken()
    if match := _ROOT_CAUSE.search(log):
        exit_code = int(match[2])
        what = f"{'was' if exit_code < 0 else 'ended with'} {describe_exit(exit_code)}{_abort_message(folder)}"
        return RunResult(outcome="crash", message=f"rank {match[1]} {what}; the others were ended")
    if _RENDEZVOUS_LOST.search(log):
        return RunResult(
            outcome="crash", message="the node of the rendezvous has ended, or is unreachable", hint=SEE_OTHER_NODE
        )
    return RunResult(outcome="crash", message=f"the launcher ended with {describe_exit(status)}")


def with_context(failure: RunResult) -> RunResult:
    """A rank's failure, with the rank's number in its message, or with an explanation if the cause is known."""
    if _PORT_TAKEN.search(failure.message):
        return _port_taken()
    common = failure.outcome == "timeout" or failure.exit_status == UsageError.exit_status
    if failure.rank is None or common:  # the same on every rank
        return failure
    return replace(failure, message=f"rank {failure.rank}: {failure.message}")


def _abort_message(folder: Path) -> str:
    """The message with which NCCL or another library aborted a rank."""
    for path in sorted((folder / "ranks").rglob("stderr.log")):
        if match := _ABORT_MESSAGE.search(path.read_text(errors="replace")):
            return f" ({' '.join(match[1].split())[:200]})"
    return ""


def _no_rendezvous(endpoint: str, seconds: float) -> RunResult:
    return RunResult(
        outcome="error",
        message=f"the nodes did not meet at {endpoint} within {seconds:.0f} s",
        hint="start the same command on every node; if another program uses the port, choose another one",
    )


def _port_taken() -> RunResult:
    return RunResult(
        outcome="error",
        message="the port of the rendezvous is already in use",
        hint="choose another port: --rdzv-endpoint HOST:PORT, or MASTER_PORT under torchrun or srun",
    )
