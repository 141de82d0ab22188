"""Ranks that the user has started, by torchrun or by srun: this process is one of them, and rank 0 has the record."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import machine, rank
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.child_process import Ended
from fsdp_advisor.validation.failure_broadcast import Alarm
from fsdp_advisor.validation.measure import check, ended_as
from fsdp_advisor.validation.predict import Prediction, predict
from fsdp_advisor.validation.records import Record


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
        reported = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return reported.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        match = re.match(r"([^\[,]+)\[(\d+)", nodes)
        return f"{match[1]}{match[2]}" if match else nodes


def as_rank(case: Case, leave: Callable[[Record | None, Ended], int]) -> tuple[Record, Ended] | None:
    """The case on ranks that the user has started; a record on rank 0, nothing on the others.

    Rank 0 predicts and tells the others. Whatever fails, in whichever rank, ends this process with the status that `leave`
    returns: on rank 0 it gets a record, on the first rank of each other node none, and elsewhere it is not called.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its stack of a lost connection is many times our line
    import torch
    import torch.distributed as dist

    from fsdp_advisor.validation import worker

    began = time.monotonic()
    own, world = started_rank() or (0, 1)
    os.environ.update(adopt_slurm(dict(os.environ)))
    reported: dict[str, Any] = {}

    def failed(failure: dict[str, Any]) -> int:
        ended = replace(ended_as(failure), reported=reported, seconds=round(time.monotonic() - began, 3))
        if own == 0:
            return leave(worker.record_of(case, ended) if reported else None, ended)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            return leave(None, ended)
        return ended.exit_status

    with Alarm(own, failed, lingers=True, timeout_seconds=case.timeout_seconds) as alarm:
        if world != case.request.gpus:
            raise UsageError(
                f"gpus {case.request.gpus}, not the {world} ranks that were started", hint=f"--gpus {world}"
            )
        if case.device == "cpu":  # of its GPUs each rank says itself what it lacks
            check(case)
        machine.set_allocator(case.request.allocator_conf)
        base = rank.with_group(case.device)
        alarm.connect()
        shared: list[Any] = [None]
        if own == 0:
            shared = [predict(case.request, "measure", case.device).as_dict()]
            reported["prediction"] = shared[0]
        dist.broadcast_object_list(shared, group=rank.gossip(), device=torch.device("cpu"))
        prediction = Prediction.from_dict(shared[0])
        if own == 0:
            reported["versions"] = rank.versions(prediction, case.device, case.zero1)
        snapshot = case.snapshot if own == 0 else None
        reported |= rank.measure(prediction, case.device, zero1=case.zero1, snapshot=snapshot, base=base)
        alarm.stop()
        rank.end_group()
    if own != 0:
        return None
    ended = Ended(outcome="ok", reported=reported, seconds=round(time.monotonic() - began, 3))
    return worker.record_of(case, ended), ended
