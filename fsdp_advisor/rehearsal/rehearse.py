"""Rehearse a command: prepare the simulated machine, run the command on it, and read the measurements of its processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_advisor.diagnosis import diagnose_file
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment
from fsdp_advisor.rehearsal.inside.launchers import free_port, variables_of
from fsdp_advisor.rehearsal.launch import interpreter_of, run
from fsdp_advisor.rehearsal.prediction import NotRecognized, options_of, predict
from fsdp_advisor.rehearsal.report import OutOfMemory, Prediction, RankResult, Rehearsal, read_ranks
from fsdp_advisor.validation.process_tree import ended_like_ctrl_c

STEPS = 3
TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a rehearsal: what it simulates and how long it runs.

    `steps`: optimizer steps, 0 for the whole script. `snapshot`: a folder for one allocator snapshot per rank. `ranks`: run only these,
    each alone, with simulated answers of the others. `empty_weights`: `from_pretrained` reads empty checkpoints. `random_data`: random
    texts replace data sets.
    """

    gpu: str
    gpus: int = 1
    nnodes: int = 1
    steps: int = STEPS
    timeout_s: float = TIMEOUT_S
    snapshot: Path | None = None
    ranks: tuple[int, ...] = ()
    empty_weights: bool = False
    random_data: bool = False
    predict: bool = True
    quiet: bool = False


def rehearse(command: Sequence[str], settings: Settings) -> Rehearsal:
    """Run a command on simulated GPUs and return what each rank used. SIGTERM and SIGHUP end it like Ctrl-C.

    Raises UsageError for impossible settings and RehearsalError if the rehearsal cannot start. A command that fails is a result.
    """
    if not command:
        raise UsageError("there is no command to rehearse", hint="give it after --, such as: -- torchrun train.py")
    if any(rank >= settings.gpus for rank in settings.ranks):
        raise UsageError(f"there is no rank {max(settings.ranks)} of {settings.gpus}", hint="ranks count from 0")
    if settings.gpus % settings.nnodes:
        raise UsageError(f"{settings.gpus} GPUs cannot be divided among {settings.nnodes} nodes", hint="change --gpus")
    with ended_like_ctrl_c():
        return _rehearsed(command, settings)


def _rehearsed(command: Sequence[str], settings: Settings) -> Rehearsal:
    gpu = find_gpu(settings.gpu)
    variables = environment(interpreter_of(command), gpu, settings.gpus // settings.nnodes, settings.nnodes)
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    try:
        inside = variables | _variables_of(settings, folder)
        ended = run(command, inside, timeout_s=settings.timeout_s, quiet=settings.quiet)
        ranks = tuple(_with_diagnosis(rank) for rank in read_ranks(folder))
        prediction = None
        if settings.predict and ranks and not ended.interrupted:
            prediction = _prediction(ranks[0], settings, folder, variables)
        return Rehearsal(
            command=tuple(command), gpu=gpu.name, gpus=settings.gpus, nnodes=settings.nnodes,
            ranks=_with_kept_snapshots(ranks, folder, settings.snapshot), ended=ended, prediction=prediction,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _variables_of(settings: Settings, folder: Path) -> dict[str, str]:
    """The environment variables with the settings for the processes of the script."""
    per_node = settings.gpus // settings.nnodes
    found = {
        "REHEARSAL_FOLDER": str(folder),
        "REHEARSAL_STEPS": str(settings.steps),
        "REHEARSAL_WORLD_SIZE": str(settings.gpus),
        "REHEARSAL_GPUS_PER_NODE": str(per_node),
    }
    flags = {
        "REHEARSAL_SNAPSHOT": settings.snapshot is not None,
        "REHEARSAL_EMPTY_WEIGHTS": settings.empty_weights,
        "REHEARSAL_RANDOM_DATA": settings.random_data,
    }
    found |= {name: "1" for name, wanted in flags.items() if wanted}
    if settings.ranks:
        found["REHEARSAL_RANKS"] = ",".join(map(str, settings.ranks))
        # for a script without a launcher
        found |= variables_of(settings.ranks[0], settings.gpus, per_node, free_port())
    return found


def _with_diagnosis(rank: RankResult) -> RankResult:
    """The rank, with the tensors that were alive when it first ran out of memory."""
    if not rank.out_of_memory or rank.out_of_memory[0].snapshot is None:
        return rank
    first, *rest = rank.out_of_memory
    try:
        found = diagnose_file(str(first.snapshot), device=first.device)
    except AdvisorError:
        return rank
    changes = tuple(f"{change.what}: {change.because}" for change in found.changes)
    return replace(rank, out_of_memory=(replace(first, alive=dict(found.memory), changes=changes), *rest))


def _prediction(rank: RankResult, settings: Settings, folder: Path, variables: dict[str, str]) -> Prediction:
    try:
        return predict(options_of(rank, settings.gpu, settings.nnodes, folder), variables)
    except NotRecognized as error:
        return Prediction(options={}, figures={}, reason=str(error))


def _with_kept_snapshots(ranks: Sequence[RankResult], folder: Path, kept: Path | None) -> tuple[RankResult, ...]:
    """The ranks with the paths of their snapshots after they were moved to the folder `kept`; without paths if it is None."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.pickle"):
            shutil.move(path, kept / path.name)

    def moved(error: OutOfMemory) -> OutOfMemory:
        path = None if kept is None or error.snapshot is None else str(kept / Path(error.snapshot).name)
        return replace(error, snapshot=path)

    return tuple(replace(rank, out_of_memory=tuple(map(moved, rank.out_of_memory))) for rank in ranks)
