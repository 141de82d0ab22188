"""One real rank. `python -m fsdp_advisor.validation.rank FOLDER` runs one under torch.distributed.run; FOLDER holds job.json."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Case, Zero1, uses_zero_redundancy_optimizer
from fsdp_advisor.validation.child_process import Send
from fsdp_advisor.validation.choices import Device
from fsdp_advisor.validation.failure_broadcast import FailureBroadcaster
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.predict import Prediction
from fsdp_advisor.validation.process_tree import die_with_parent
from fsdp_advisor.validation.run_result import RunResult

if TYPE_CHECKING:
    from fsdp_advisor.validation.gpu_memory import Baseline


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of every rank, in addition to the prediction. Only rank 0 writes the memory history `snapshot`."""

    device: Device
    zero1: Zero1 = "deepspeed"
    snapshot: str | None = None
    allocator_conf: str | None = None

    @classmethod
    def of_case(cls, case: Case) -> RankSettings:
        return cls(
            device=case.device,
            zero1=case.zero1,
            snapshot=str(case.snapshot.absolute()) if case.snapshot else None,
            allocator_conf=case.request.allocator_conf,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def main(folder: Path) -> None:
    """Run the case of FOLDER/job.json. Rank 0 writes versions.json and measured.json; a failed rank writes failure-RANK.json."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's SIGTERM ends a rank even inside a collective
    die_with_parent(os.getppid())
    (folder / f"started-{rank}").touch()
    several_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1

    def on_failure(failure: RunResult) -> int:
        _write(folder / f"failure-{rank}.json", {**failure.as_dict(), "time": time.time()})
        return 1

    with FailureBroadcaster(rank, on_failure, keep_alive_after_failure=several_nodes) as broadcaster:
        job = json.loads((folder / "job.json").read_text())
        run_rank(
            RankSettings(**job["settings"]),
            broadcaster,
            lambda: Prediction.from_dict(job["prediction"]),
            lambda name, value: _write(folder / f"{name}.json", value),
        )


def _write(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the whole file or none."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def run_rank(
    settings: RankSettings, broadcaster: FailureBroadcaster, prediction_of: Callable[[], Prediction], send: Send
) -> None:
    """Join the ranks, measure, and leave together. Rank 0 sends `versions` and `measured`.

    `prediction_of` is called once the ranks have met, because rank 0 may have to share the prediction.
    """
    machine.set_allocator(settings.allocator_conf)
    baseline = join_group(settings.device)
    broadcaster.connect()
    prediction = prediction_of()
    first = os.environ["RANK"] == "0"
    if first:
        deepspeed = prediction.plan.backend == "deepspeed" and settings.zero1 == "deepspeed"
        send("versions", machine.versions(deepspeed=deepspeed, cuda=settings.device == "cuda"))
    measured = measure(prediction, settings, baseline)
    if first:
        send("measured", measured)
    broadcaster.stop()
    leave_group()


def join_group(device: Device) -> Baseline | None:
    """Make the process group: gloo on the CPU, NCCL on GPUs. On a GPU, returns the memory in use before."""
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return None
    from fsdp_advisor.validation.gpu_memory import measure_baseline

    index = gpu_index(int(os.environ.get("LOCAL_RANK", "0")), machine.gpu_count())
    baseline = measure_baseline(index)
    dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    return baseline


def leave_group() -> None:
    """Leave the process group together: if rank 0 leaves early, the store ends with it."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def host_group() -> Any:
    """A second process group over gloo, for messages that must not use the GPUs that are measured."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def gpu_index(local_rank: int, gpus: int) -> int:
    """The GPU of a rank: the only visible one (as under `srun --gpus-per-task=1`), or the one with the local rank's number.

    >>> gpu_index(3, 8), gpu_index(3, 1)
    (3, 0)
    """
    if local_rank >= gpus and gpus != 1:
        raise ModeUnavailable(
            f"local rank {local_rank} has no GPU: this machine has {gpus or 'none'}",
            hint="start as many ranks per node as it has GPUs; --device cpu runs real ranks over gloo",
        )
    return local_rank if gpus > 1 else 0


def measure(prediction: Prediction, settings: RankSettings, baseline: Baseline | None = None) -> dict[str, Any]:
    """Rank 0's figures of a steady step, combined with those of all ranks. Needs the process group."""
    import torch.distributed as dist

    from fsdp_advisor.validation.real import RealRun, run_steady_step

    plan = prediction.plan
    group = host_group()

    def gathered(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
        return values

    placement = ranks_per_node(gathered(node_name(os.environ)), plan.nnodes)
    first = dist.get_rank() == 0
    run = RealRun(
        source=prediction.source(),
        plan=plan,
        mode="measure",
        device=settings.device,
        zero1=settings.zero1,
        snapshot=Path(settings.snapshot) if settings.snapshot and first else None,
        baseline=baseline,
        segments=prediction.segments if first and not uses_zero_redundancy_optimizer(plan, settings.zero1) else None,
    )
    return {**combined(gathered(run_steady_step(run))), "ranks_per_node": placement}


def node_name(environment: Mapping[str, str]) -> str:
    """The number of this rank's node under torchrun or srun, or else the host's name."""
    return environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or socket.gethostname()


def ranks_per_node(nodes: Sequence[str], nnodes: int) -> list[int]:
    """The number of ranks on each node. `nodes` is the node of each rank; a single node may stand for several.

    Raises UsageError if the ranks are not placed as the request says, because HSDP would then shard across nodes.

    >>> ranks_per_node(["a", "a", "b", "b"], 2), ranks_per_node(["a"] * 4, 2)
    ([2, 2], [4])
    """
    placement = [len(list(ranks)) for _, ranks in itertools.groupby(nodes)]
    count = len(set(nodes))
    if count not in (1, nnodes):
        raise UsageError(f"nnodes {nnodes}, but the ranks run on {count} nodes", hint=f"--nnodes {count}")
    if len(placement) != count or len(set(placement)) != 1:
        raise UsageError(
            f"consecutive ranks must fill one node after the other, but their nodes are {', '.join(nodes)}",
            hint="start equally many ranks on each node; under Slurm: srun --distribution=block --ntasks-per-node=N",
        )
    return placement


def combined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's figures; `largest` and `spread` (largest - smallest) of each peak over all ranks; `by_rank`, each rank's peaks.

    >>> combined([{"peak_tensor_bytes": 5, "phase_peaks": {"forward": 5}}, {"peak_tensor_bytes": 3, "phase_peaks": {}}])["spread"]
    {'peak_tensor_bytes': 2}
    """
    by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0] if name.startswith("peak_")}
    return {
        **ranks[0],
        "largest": {name: max(values) for name, values in by_rank.items()},
        "spread": {name: max(values) - min(values) for name, values in by_rank.items()},
        "by_rank": by_rank,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
