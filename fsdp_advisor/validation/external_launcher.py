"""Ranks that the user has started with torchrun or srun. This process is one of them; rank 0 makes the record."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import rank, worker
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.failure_broadcast import FailureBroadcaster
from fsdp_advisor.validation.measure import check, with_context
from fsdp_advisor.validation.predict import Prediction, predict_case
from fsdp_advisor.validation.records import Record
from fsdp_advisor.validation.run_result import RunResult


def external_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, world size) if torchrun or srun has started this process as one of several, else None.

    Slurm sets SLURM_PROCID in batch scripts too; only a step of several tasks has ranks.
    >>> external_rank({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}), external_rank({"SLURM_PROCID": "0"})
    ((1, 4), None)
    """
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    return None


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch.distributed reads, from those that srun sets. Empty under torchrun, which sets them itself.

    The ranks meet on the first node of the step. Source: Slurm's srun manual, "output environment variables".
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
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return listed.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        match = re.match(r"([^\[,]+)\[(\d+)", nodes)
        return f"{match[1]}{match[2]}" if match else nodes


def run_as_rank(case: Case, on_failure: Callable[[Record | None, RunResult], int]) -> tuple[Record, RunResult] | None:
    """Run the case as one of the started ranks. Returns the record on rank 0, None on the others.

    Rank 0 predicts and shares the prediction. The failure of any rank ends every rank's process. `on_failure` returns the exit
    status; it is called on rank 0, with a record if a prediction exists, and on the first rank of each other node, without one.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides long C++ stack traces of lost connections
    began = time.monotonic()
    own, world_size = external_rank() or (0, 1)
    os.environ.update(torch_variables(os.environ))
    reported: dict[str, Any] = {}

    def result(of: RunResult) -> RunResult:
        return replace(of, reported=reported, seconds=round(time.monotonic() - began, 3))

    def failed(failure: RunResult) -> int:
        failure = result(with_context(failure))
        if own == 0:
            return on_failure(worker.record_of(case, failure) if reported else None, failure)
        return on_failure(None, failure) if os.environ.get("LOCAL_RANK", "0") == "0" else failure.exit_status

    with FailureBroadcaster(
        own, failed, keep_alive_after_failure=True, timeout_seconds=case.time_limit_seconds
    ) as broadcaster:
        if world_size != case.request.gpus:
            raise UsageError(
                f"gpus {case.request.gpus}, but {world_size} ranks were started", hint=f"--gpus {world_size}"
            )
        if case.device == "cpu":  # on GPUs, each rank checks its own GPU
            check(case)
        rank.run_rank(
            rank.RankSettings.of_case(case),
            broadcaster,
            lambda: _shared_prediction(case, own, reported),
            lambda name, value: reported.update({name: value}),
        )
    if own != 0:
        return None
    ended = result(RunResult(outcome="ok"))
    return worker.record_of(case, ended), ended


def _shared_prediction(case: Case, own: int, reported: dict[str, Any]) -> Prediction:
    """The prediction of rank 0, on every rank."""
    import torch
    import torch.distributed as dist

    shared: list[Any] = [None]
    if own == 0:
        shared = [predict_case(case).as_dict()]
        reported["prediction"] = shared[0]
    dist.broadcast_object_list(shared, group=rank.host_group(), device=torch.device("cpu"))
    return Prediction.from_dict(shared[0])
