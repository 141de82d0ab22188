"""The third rung: real ranks, launched by torch.distributed.run, over NCCL on GPUs or over gloo on the CPU.

On the CPU the same code counts live bytes of storages instead of asking CUDA's allocator.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from fsdp_advisor.errors import UsageError
from fsdp_advisor.request import EstimateRequest
from fsdp_advisor.validation import launch, machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.failures import NotHere, describe_exit
from fsdp_advisor.validation.launch import Ended, Tell
from fsdp_advisor.validation.predict import predict

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def launch_ranks(case: Case) -> Ended:
    """The case on real ranks; outcome, figures and trouble as of a forked worker.

    Raises NotHere where this machine has too few GPUs, before anything is started.
    """
    check(case)
    launch.warm_up()
    began = time.monotonic()
    predicted = launch.forked(lambda tell: _predict(case, tell), timeout_seconds=case.timeout_seconds)
    if predicted.outcome != "ok":
        return predicted
    folder = Path(tempfile.mkdtemp(prefix="fsdp-advisor-"))
    job = {
        "prediction": predicted.told["prediction"],
        "device": case.device,
        "zero1": case.zero1,
        "snapshot": str(case.snapshot.absolute()) if case.snapshot else None,
    }
    (folder / "job.json").write_text(json.dumps(job))
    left = case.timeout_seconds - (time.monotonic() - began)
    ended = _watch(folder, command(case, folder), max(1.0, left))
    if ended.outcome == "timeout" and case.rdzv_endpoint is not None and not any((folder / "ranks").rglob("*.log")):
        ended = _did_not_meet(case.rdzv_endpoint, ended.message)
    told = {**predicted.told, **ended.told}
    if ended.outcome == "ok":
        shutil.rmtree(folder, ignore_errors=True)
    return Ended(
        outcome=ended.outcome,
        told=told,
        message=ended.message,
        detail=ended.detail if ended.outcome == "ok" else {**ended.detail, "log": str(folder)},
        seconds=round(time.monotonic() - began, 3),
        exit_status=ended.exit_status,
        hint=ended.hint,
    )


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


def command(case: Case, folder: Path) -> list[str]:
    """The torch.distributed.run command line of a case."""
    meeting = ["--standalone"]
    if case.rdzv_endpoint is not None:
        meeting = [f"--nnodes={case.request.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={case.rdzv_endpoint}"]
        meeting.append("--rdzv-id=fsdp-advisor")
    return [
        sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={ranks_here(case)}",
        f"--log-dir={folder / 'ranks'}", "--redirects=3", "--monitor-interval=0.1",
        "-m", "fsdp_advisor.validation.rank", str(folder),
    ]  # fmt: skip


def _watch(folder: Path, arguments: list[str], timeout_seconds: float) -> Ended:
    """Wait for the launcher; whatever happens, no rank is left."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    log = folder / "launcher.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            launch.kill_tree(process.pid)
            process.wait()
            return Ended(outcome="timeout", message=f"no end after {timeout_seconds:.0f} s; all ranks were ended")
        except KeyboardInterrupt:
            with launch.undisturbed():
                launch.kill_tree(process.pid)
                process.wait()
            return Ended(outcome="interrupted", message="interrupted; all ranks were ended")
    return ended_with(folder, status, log.read_text(errors="replace"))


def ended_with(folder: Path, status: int, log: str) -> Ended:
    """What the ranks left: rank 0's result, or the first failure, or what the launcher says of a rank that died."""
    result = folder / "result.json"
    if status == 0 and result.exists():
        return Ended(outcome="ok", told=json.loads(result.read_text()))
    failures = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    if failures:
        first = min(failures, key=lambda f: float(f.pop("time")))
        rank = first.pop("rank")
        first["message"] = f"rank {rank}: {first['message']}"
        if _PORT_TAKEN.search(first["message"]):
            return _port_taken(folder)
        return Ended(**first)
    if status == 0:
        return Ended(outcome="error", message="rank 0 is on another node, which has the result", exit_status=0)
    if _PORT_TAKEN.search(log):
        return _port_taken(folder)
    if match := _ROOT_CAUSE.search(log):
        what = describe_exit(int(match[2]))
        return Ended(
            outcome="crash",
            message=f"rank {match[1]} {'was' if int(match[2]) < 0 else 'ended with'} {what}; the others were ended; log: {folder}",
        )
    return Ended(outcome="crash", message=f"the launcher ended with {describe_exit(status)}; log: {folder}")


def _did_not_meet(endpoint: str, ended: str) -> Ended:
    return Ended(
        outcome="error",
        message=f"the nodes did not meet at {endpoint}: {ended}",
        hint="start the same command on every node; or something else answers there, and another port is free",
    )


def _port_taken(folder: Path) -> Ended:
    return Ended(
        outcome="error",
        message=f"the ranks' meeting port is taken; log: {folder}",
        hint="give another port: --rdzv-endpoint HOST:PORT, or MASTER_PORT under torchrun or srun",
    )


def started_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, world size) where the user has started this process as one of several ranks, by torchrun or by srun.

    A batch script is no rank, although Slurm gives it SLURM_PROCID: only a step of several tasks has them.
    >>> started_rank({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}), started_rank({"SLURM_PROCID": "0"})
    ((1, 4), None)
    """
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    return None


def adopt_slurm(environment: dict[str, str]) -> dict[str, str]:
    """The variables that PyTorch reads, from those that srun sets; those of torchrun as they are.

    The first node of the step is where ranks meet. Source: Slurm's srun manual, "output environment variables".
    """
    if "RANK" in environment:
        return {}
    job = int(environment.get("SLURM_JOB_ID") or 0)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + job % 10_000),
    }


def _first_host(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    if "[" not in nodes:
        return nodes.split(",")[0]
    try:
        told = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return told.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        match = re.match(r"([^\[,]+)\[(\d+)", nodes)
        return f"{match[1]}{match[2]}" if match else nodes


def sbatch_example(request: EstimateRequest, *, records: Path | None = None) -> str:
    """A batch script that measures the request under Slurm, one launcher per node. Rank 0 writes the record."""
    per_node = request.gpus // request.nnodes
    options: list[str] = []
    for name, value in request.changed.items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if records is not None:
        options += ["--records", str(records)]
    job = f"-m fsdp_advisor validate --rung measure \\\n  {shlex.join(options)}"
    return f"""#!/bin/bash
#SBATCH --job-name=fsdp-advisor
#SBATCH --nodes={request.nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --time=00:30:00
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes={request.nnodes} --nproc-per-node={per_node} \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \\
  {job}
# Without torchrun: --ntasks-per-node={per_node} above, and srun python {job.splitlines()[0].removesuffix(" " + chr(92))} ...
"""


def end_on_termination() -> None:
    """Let the launcher's SIGTERM end a rank at once, in the middle of a collective."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
