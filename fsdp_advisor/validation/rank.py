"""One real rank: ``python -m fsdp_advisor.validation.rank FOLDER`` under torch.distributed.run. FOLDER holds job.json."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.launch import Ended, die_with_parent, failure_of
from fsdp_advisor.validation.measure import adopt_slurm, end_on_termination, started_rank
from fsdp_advisor.validation.on_gpu import STEADY
from fsdp_advisor.validation.predict import Prediction, predict
from fsdp_advisor.validation.records import Record

if TYPE_CHECKING:
    from fsdp_advisor.validation.stand_in import Baseline


def main(folder: Path) -> None:
    """Rank 0 writes result.json; a rank that fails says why in a file of its own and ends, upon which the others are ended."""
    rank = int(os.environ["RANK"])
    end_on_termination()
    die_with_parent(os.getppid())
    try:
        job = json.loads((folder / "job.json").read_text())
        device: str = job["device"]
        prediction = Prediction.from_dict(job["prediction"])
        machine.set_allocator(prediction.request.get("allocator_conf"))
        base = with_group(device)
        snapshot = Path(job["snapshot"]) if job["snapshot"] and rank == 0 else None
        told = measure(prediction, device, zero1=job["zero1"], snapshot=snapshot, base=base)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(told))
    except BaseException as error:
        failure = {**failure_of(error), "rank": rank, "time": time.time()}
        partial = folder / f".failure-{rank}"
        partial.write_text(json.dumps(failure))
        partial.replace(folder / f"failure-{rank}.json")
        sys.stderr.flush()
        os._exit(1)
    end_group()


def as_rank(case: Case) -> tuple[Record, Ended] | None:
    """The case on ranks that the user has started; a record on rank 0, nothing on the others.

    Rank 0 predicts and tells the others. Raises MeasurementError in one line whatever ends this rank.
    """
    from fsdp_advisor.validation import worker

    began = time.monotonic()
    rank, world = started_rank() or (0, 1)
    if world != case.request.gpus:
        raise UsageError(f"gpus {case.request.gpus}, not the {world} ranks that were started", hint=f"--gpus {world}")
    os.environ.update(adopt_slurm(dict(os.environ)))
    try:
        machine.set_allocator(case.request.allocator_conf)
        base = with_group(case.device)
        import torch.distributed as dist

        told: list[Any] = [None]
        if rank == 0:
            try:
                told = [predict(case.request, "measure", case.device).as_dict()]
            except AdvisorError as error:
                told = [failure_of(error)]
        dist.broadcast_object_list(told, device=_current(case.device))
        if "outcome" in told[0]:
            raise Ended(**told[0]).error()
        prediction = Prediction.from_dict(told[0])
        snapshot = case.snapshot if rank == 0 else None
        found = measure(prediction, case.device, zero1=case.zero1, snapshot=snapshot, base=base)
        end_group()
    except AdvisorError:
        raise
    except Exception as error:
        raise Ended(**failure_of(error)).error() from error
    if rank != 0:
        return None
    ended = Ended(outcome="ok", told={**found, "prediction": told[0]}, seconds=round(time.monotonic() - began, 3))
    return worker.record_of(case, ended), ended


def _current(device: str) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def with_group(device: str) -> Baseline | None:
    """Join the ranks; on GPUs the local rank's own is made the current one first, and what it holds by then is told."""
    import torch
    import torch.distributed as dist

    from fsdp_advisor.validation.stand_in import baseline

    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    base = baseline(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    return base


def end_group() -> None:
    """Leave together: a rank that leaves early takes its store with it."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def measure(
    prediction: Prediction,
    device: str,
    *,
    zero1: Any = "deepspeed",
    snapshot: Path | None = None,
    base: Baseline | None = None,
) -> dict[str, Any]:
    """This rank's steady step, and on rank 0 everybody's; needs the process group. What comes back is as a worker tells it."""
    import torch
    import torch.distributed as dist

    from fsdp_advisor.validation.meter import CudaMeter, Meter, StorageMeter
    from fsdp_advisor.validation.real import assemble, figures, mesh_for, steady_step
    from fsdp_advisor.validation.stand_in import allocator_figures, memory_history, untimed

    plan = prediction.plan
    gossip = dist.new_group(backend="gloo")  # figures travel on the host
    cuda = device == "cuda"
    index = torch.cuda.current_device() if cuda else 0
    meter: Meter = CudaMeter(index) if cuda else StorageMeter()
    with memory_history(snapshot):
        mesh = mesh_for(plan, device, meter)
        with meter:
            trainer = assemble(prediction.source(), plan, device, mesh, rung="measure", zero1=zero1)
            phases = steady_step(
                trainer,
                meter,
                plan.gradient_accumulation_steps,
                pick=max if cuda else min,
                steady=STEADY["measure"] if cuda else 5,
            )
        found = figures(phases, communicates=True)
        if snapshot is not None:
            found = untimed(found)
        if base is not None:
            ours = prediction.segments if dist.get_rank() == 0 else None
            found |= allocator_figures(index, base, found, ours)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=gossip)
    versions = machine.versions(deepspeed=plan.backend == "deepspeed" and zero1 == "deepspeed", cuda=cuda)
    return {"measured": combined(everyone), "versions": versions}


def combined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's figures under their names; `largest` and `spread` (largest less smallest) over all ranks; peaks rank by rank.

    >>> combined([{"peak_tensor_bytes": 5, "phase_peaks": {"forward": 5}}, {"peak_tensor_bytes": 3, "phase_peaks": {}}])["spread"]
    {'peak_tensor_bytes': 2}
    """
    names = [n for n in ranks[0] if n.startswith("peak_")]
    by_rank = {n: [rank[n] for rank in ranks] for n in names}
    return {
        **ranks[0],
        "largest": {n: max(values) for n, values in by_rank.items()},
        "spread": {n: max(values) - min(values) for n, values in by_rank.items()},
        "by_rank": by_rank,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
