"""One real rank: ``python -m fsdp_advisor.validation.rank FOLDER`` under torch.distributed.run. FOLDER holds job.json."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.child_process import die_with_parent
from fsdp_advisor.validation.failure_broadcast import Alarm
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.on_gpu import STEADY
from fsdp_advisor.validation.predict import Prediction

if TYPE_CHECKING:
    from fsdp_advisor.validation.stand_in import Baseline


def main(folder: Path) -> None:
    """Rank 0 writes result.json; whatever ends a rank, of whichever node, is written on each, upon which the others are ended."""
    rank = int(os.environ["RANK"])
    end_on_termination()
    die_with_parent(os.getppid())
    (folder / f"started-{rank}").touch()
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    with Alarm(rank, lambda failure: _leave(folder, failure), lingers=nodes > 1) as alarm:
        job = json.loads((folder / "job.json").read_text())
        device: str = job["device"]
        prediction = Prediction.from_dict(job["prediction"])
        machine.set_allocator(prediction.request.get("allocator_conf"))
        base = with_group(device)
        alarm.connect()
        if rank == 0:
            (folder / "versions.json").write_text(json.dumps(versions(prediction, device, job["zero1"])))
        snapshot = Path(job["snapshot"]) if job["snapshot"] and rank == 0 else None
        reported = measure(prediction, device, zero1=job["zero1"], snapshot=snapshot, base=base)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(reported))
        alarm.stop()
        end_group()


def end_on_termination() -> None:
    """Let the launcher's SIGTERM end a rank at once, in the middle of a collective."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(folder: Path, failure: dict[str, Any]) -> int:
    """Write a rank's failure for the process that launched this node's."""
    name = f"failure-{os.environ['RANK']}"
    partial = folder / f".{name}"
    partial.write_text(json.dumps({**failure, "time": time.time()}))
    partial.replace(folder / f"{name}.json")
    return 1


def with_group(device: str) -> Baseline | None:
    """Join the ranks; on GPUs the local rank's own is made the current one first, and what it holds by then is told."""
    import torch
    import torch.distributed as dist

    from fsdp_advisor.validation.stand_in import baseline

    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return None
    index = gpu_index(int(os.environ.get("LOCAL_RANK", "0")), machine.gpu_count())
    base = baseline(index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    return base


def gossip() -> Any:
    """All ranks, to tell each other what is no part of the job: on the host, for the GPU is what is measured."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def gpu_index(local_rank: int, gpus: int) -> int:
    """Which GPU is a rank's: the only one that it is shown, as by `srun --gpus-per-task=1`, else the one of its local number.

    >>> gpu_index(3, 8), gpu_index(3, 1)
    (3, 0)
    """
    if local_rank >= gpus and gpus != 1:
        raise NotHere(
            f"local rank {local_rank} has no GPU: this machine shows {gpus or 'none'}",
            hint="start as many ranks per node as it has GPUs; --device cpu runs real ranks over gloo",
        )
    return local_rank if gpus > 1 else 0


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
    from fsdp_advisor.validation.real import WATCHDOG_SECONDS, assemble, figures, mesh_for, steady_step
    from fsdp_advisor.validation.stand_in import allocator_figures, memory_history, untimed

    plan = prediction.plan
    group = gossip()
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node(os.environ), group=group)
    placed = ranks_per_node(nodes, plan.nnodes)
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
                pause_seconds=WATCHDOG_SECONDS if cuda else 0,
            )
        found = figures(phases, communicates=True)
        if isinstance(meter, StorageMeter) and meter.gloo_bytes:
            found["gloo_bytes"] = meter.gloo_bytes
        if snapshot is not None:
            found = untimed(found)
        if base is not None:
            modelled = dist.get_rank() == 0 and not (plan.strategy == "zero1" and zero1 == "torch")
            ours = prediction.segments if modelled else None
            found |= allocator_figures(index, base, found, ours)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=group)
    return {"measured": {**combined(everyone), "ranks_per_node": placed}}


def versions(prediction: Prediction, device: str, zero1: str) -> dict[str, str]:
    """What this rank runs on."""
    deepspeed = prediction.plan.backend == "deepspeed" and zero1 == "deepspeed"
    return machine.versions(deepspeed=deepspeed, cuda=device == "cuda")


def node(environment: Mapping[str, str]) -> str:
    """This rank's node, as torchrun or srun number them, else by its host's name."""
    return environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or socket.gethostname()


def ranks_per_node(nodes: Sequence[str], nnodes: int) -> list[int]:
    """How many ranks each node has, from every rank's; one node may stand for several.

    Raises UsageError where the ranks are not placed as the request says: what shards within a node would shard across.

    >>> ranks_per_node(["a", "a", "b", "b"], 2), ranks_per_node(["a"] * 4, 2)
    ([2, 2], [4])
    """
    placed = [len(list(ranks)) for _, ranks in itertools.groupby(nodes)]
    count = len(set(nodes))
    if count not in (1, nnodes):
        raise UsageError(f"nnodes {nnodes}, but the ranks are on {count} nodes", hint=f"--nnodes {count}")
    if len(placed) != count or len(set(placed)) != 1:
        raise UsageError(
            f"the ranks do not fill one node after the other: theirs are {', '.join(nodes)}",
            hint="as many on each; under Slurm: srun --distribution=block --ntasks-per-node=N",
        )
    return placed


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
