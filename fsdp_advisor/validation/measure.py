"""The third rung: real ranks, launched by torch.distributed.run, over NCCL on GPUs or over gloo on the CPU.

On the CPU the same code counts live bytes of storages instead of asking CUDA's allocator.
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
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import child_process, machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.child_process import Ended, Tell
from fsdp_advisor.validation.failure_broadcast import ELSEWHERE, MEET_SECONDS
from fsdp_advisor.validation.failures import NotHere, describe_exit
from fsdp_advisor.validation.predict import predict

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PARTED = re.compile(r"RendezvousConnectionError|RendezvousClosedError")
_LAST_WORDS = re.compile(r"(?:what\(\):\s*|DistBackendError: )(.+)")
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def launch_ranks(case: Case) -> Ended:
    """The case on real ranks; outcome, figures and trouble as of a forked worker.

    Raises NotHere where this machine has too few GPUs, before anything is started.
    """
    check(case)
    if case.rdzv_endpoint is not None:
        check_endpoint(case.rdzv_endpoint)
    child_process.warm_up()
    began = time.monotonic()
    predicted = child_process.forked(lambda tell: _predict(case, tell), timeout_seconds=case.timeout_seconds)
    if predicted.outcome != "ok":
        return predicted
    folder = Path(tempfile.mkdtemp(prefix="fsdp-advisor-"))
    job = {
        "prediction": predicted.reported["prediction"],
        "device": case.device,
        "zero1": case.zero1,
        "snapshot": str(case.snapshot.absolute()) if case.snapshot else None,
    }
    (folder / "job.json").write_text(json.dumps(job))
    left = max(1.0, case.timeout_seconds - (time.monotonic() - began))
    ended = _watch(folder, command(case, folder, timeout_seconds=left), left)
    alone = case.rdzv_endpoint is None
    if not alone and ended.outcome in ("timeout", "crash", "error") and not any(folder.glob("started-*")):
        ended = _did_not_meet(str(case.rdzv_endpoint), min(left, MEET_SECONDS))
    versions = folder / "versions.json"
    reported = {**predicted.reported, **({"versions": json.loads(versions.read_text())} if versions.exists() else {})}
    elsewhere = not alone and not (folder / "started-0").exists()
    if ended.outcome == "ok":
        shutil.rmtree(folder, ignore_errors=True)
    return Ended(
        outcome=ended.outcome,
        reported={**reported, **ended.reported},
        message=ended.message,
        detail=ended.detail if ended.outcome == "ok" else {**ended.detail, "log": str(folder)},
        seconds=round(time.monotonic() - began, 3),
        exit_status=ended.exit_status,
        hint=ended.hint,
        elsewhere=elsewhere,
    )


def check_endpoint(endpoint: str) -> None:
    """Raises UsageError for what is no HOST:PORT, or no host that this machine knows; torchrun would try for minutes."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rdzv-endpoint {endpoint} is no HOST:PORT", hint="as in --rdzv-endpoint node1:29500")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError):
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: this machine knows no host {host}",
            hint="name one of the nodes, or its address",
        ) from None


def check(case: Case) -> None:
    """Raises NotHere for ranks that this machine cannot have."""
    request, per_node = case.request, ranks_here(case)
    if case.device == "cuda":
        there = machine.gpu_count()
        if not there:
            raise NotHere(
                "no GPU is at hand, and a measurement needs one per rank",
                hint="--rung simulate needs none; --device cpu runs real ranks over gloo and counts live bytes",
            )
        if there < per_node:
            if request.nnodes > 1 and case.rdzv_endpoint is None and there >= request.gpus // request.nnodes:
                raise UsageError(
                    f"a measurement on {request.nnodes} nodes needs a place for them to meet",
                    hint="give --rdzv-endpoint HOST:PORT on each node, or run it under torchrun or srun: --sbatch prints an example",
                )
            raise NotHere(
                f"gpus {request.gpus}, nnodes {request.nnodes}: {per_node} on this machine, more than the {there} it has",
                hint=f"--gpus {there} measures on those there are; --device cpu runs real ranks over gloo"
                if request.backend == "deepspeed"
                else "--rung stand-in lets one GPU play rank 0 of any world",
            )
    elif case.snapshot is not None:
        raise NotHere("PyTorch keeps a memory history of GPUs alone", hint="leave --snapshot out")


def ranks_here(case: Case) -> int:
    """Ranks on this machine: a node's where nodes have a place to meet, else all, nodes being groups of them in name."""
    nodes = case.request.nnodes if case.rdzv_endpoint is not None else 1
    return case.request.gpus // nodes


def _predict(case: Case, tell: Tell) -> None:
    from fsdp_advisor.validation import real

    prediction = predict(case.request, "measure", case.device)
    tell("prediction", prediction.as_dict())
    real.check(prediction.plan, case.device)


def command(case: Case, folder: Path, timeout_seconds: float = MEET_SECONDS) -> list[str]:
    """The torch.distributed.run command line of a case. Nodes on which another case was asked for do not meet these."""
    meeting = ["--standalone"]
    if case.rdzv_endpoint is not None:
        meeting = [f"--nnodes={case.request.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={case.rdzv_endpoint}"]
        same = json.dumps([case.request.as_dict(), case.device, case.zero1], sort_keys=True)
        meeting.append(f"--rdzv-id=fsdp-advisor-{hashlib.sha256(same.encode()).hexdigest()[:12]}")
        meeting.append(f"--rdzv-conf=join_timeout={math.ceil(min(timeout_seconds, MEET_SECONDS))}")
    return [
        sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={ranks_here(case)}",
        f"--log-dir={folder / 'ranks'}", "--redirects=3", "--monitor-interval=0.1",
        "-m", "fsdp_advisor.validation.rank", str(folder),
    ]  # fmt: skip


def _watch(folder: Path, arguments: list[str], timeout_seconds: float) -> Ended:
    """Wait for the launcher; whatever happens, no rank is left."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    log = folder / "launcher.log"
    own = os.getpid()
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
            preexec_fn=lambda: child_process.die_with_parent(own),  # its ranks go with it
        )  # fmt: skip
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            child_process.kill_tree(process.pid)
            process.wait()
            return Ended(outcome="timeout", message=f"no end after {timeout_seconds:.0f} s; all ranks were ended")
        except KeyboardInterrupt:
            with child_process.undisturbed():
                child_process.kill_tree(process.pid)
                process.wait()
            return Ended(outcome="interrupted", message="interrupted; all ranks were ended")
    return ended_with(folder, status, log.read_text(errors="replace"))


def ended_with(folder: Path, status: int, log: str) -> Ended:
    """What the ranks left: rank 0's result, or the first failure, or what the launcher says of a rank that died."""
    result = folder / "result.json"
    if status == 0 and result.exists():
        return Ended(outcome="ok", reported=json.loads(result.read_text()))
    failures = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    if failures:
        first = min(failures, key=lambda f: float(f["time"]))
        return ended_as(first)
    if status == 0:
        return Ended(outcome="ok")
    if _PORT_TAKEN.search(log):
        return _port_taken()
    if match := _ROOT_CAUSE.search(log):
        what = describe_exit(int(match[2]))
        return Ended(
            outcome="crash",
            message=f"rank {match[1]} {'was' if int(match[2]) < 0 else 'ended with'} {what}{_last_words(folder)}; the others were ended",
        )
    if _PARTED.search(log):
        return Ended(outcome="crash", message="the node where all met has ended, or is out of reach", hint=ELSEWHERE)
    return Ended(outcome="crash", message=f"the launcher ended with {describe_exit(status)}")


def ended_as(failure: dict[str, Any]) -> Ended:
    """A rank's failure as the case's end."""
    reported = {name: value for name, value in failure.items() if name not in ("rank", "time")}
    if _PORT_TAKEN.search(reported["message"]):
        return _port_taken()
    if "rank" in failure and reported["outcome"] != "timeout" and reported.get("exit_status") != UsageError.exit_status:
        reported["message"] = f"rank {failure['rank']}: {reported['message']}"
    return Ended(**reported)


def _last_words(folder: Path) -> str:
    """What NCCL, or whatever else aborts a process, wrote before it did."""
    for path in sorted((folder / "ranks").rglob("stderr.log")):
        if match := _LAST_WORDS.search(path.read_text(errors="replace")):
            return f" ({' '.join(match[1].split())[:200]})"
    return ""


def _did_not_meet(endpoint: str, seconds: float) -> Ended:
    return Ended(
        outcome="error",
        message=f"the nodes did not meet at {endpoint} in {seconds:.0f} s",
        hint="start the same command on every node; or something else answers there, and another port is free",
    )


def _port_taken() -> Ended:
    return Ended(
        outcome="error",
        message="the ranks' meeting port is taken",
        hint="give another port: --rdzv-endpoint HOST:PORT, or MASTER_PORT under torchrun or srun",
    )
