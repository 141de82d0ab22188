"""A job's phases, each with what it takes on a GPU and on a node's host: load, first step, steady step, save.

A job that fits while it trains may still die before the first step or at the first checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fsdp_advisor.engines.host import HostMemory
from fsdp_advisor.engines.loading import advised, deepspeed_moments, flattens_on_gpu, loadings
from fsdp_advisor.engines.saving import Saving, savings
from fsdp_advisor.engines.transfer import Loading
from fsdp_advisor.hardware.gpus import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import DeviceOverhead
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.storages import States

PHASES = ("load", "first_step", "steady_step", "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """One phase at its highest: tensors on one GPU, and host memory of the node with rank 0. None where it is unknown."""

    gpu_bytes: int | None
    host_bytes_per_node: int | None

    def fits(self, room: int, host_memory_bytes: int | None) -> bool:
        """False where it certainly does not: tensors in the most `room` that CUDA and NCCL leave, or the node's memory."""
        if self.gpu_bytes is not None and self.gpu_bytes > room:
            return False
        known = host_memory_bytes is not None and self.host_bytes_per_node is not None
        return not known or (self.host_bytes_per_node or 0) <= (host_memory_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPeaks:
    """The phases of one plan's job, with the ways of loading and saving that its figures are of, and all the others."""

    phases: Mapping[str, PhasePeak]
    loading: Loading
    saving: Saving
    loadings: tuple[Loading, ...]
    savings: tuple[Saving, ...]
    fails: str | None
    """The first phase that certainly does not fit."""

    def as_dict(self) -> dict[str, Any]:
        """The contract's `job_peaks`: GPU and host bytes by phase; of loading and saving also which way, and the files."""
        result: dict[str, Any] = {
            name: {"gpu_bytes": peak.gpu_bytes, "host_bytes_per_node": peak.host_bytes_per_node}
            for name, peak in self.phases.items()
        }
        result["load"] |= {"way": self.loading.way, "how": self.loading.how}
        result["save"] |= {"way": self.saving.way, "how": self.saving.how}
        result["save"]["files"] = [
            {"name": f.name, "count": f.count, "tensor_bytes": f.tensor_bytes} for f in self.saving.files
        ]
        return result


def job_peaks(
    profile: Profile,
    plan: Plan,
    gpu: Gpu,
    *,
    states: States,
    host: HostMemory,
    overhead: DeviceOverhead,
    phase_peaks: Mapping[str, int] | None,
    host_memory_bytes: int | None = None,
) -> JobPeaks:
    """The phases of `plan` on `gpu`. `phase_peaks` are the steady step's, None where its peak is unknown.

    The optimizer's state is made by the first optimizer step, so that step's forward and backward passes run without it.
    Saving comes between two steps, on top of what is kept.
    """
    room = gpu.memory_bytes - overhead.middle_bytes
    ways = _ways(profile, plan, gpu)
    saves = _savings(profile, plan.any_step)
    loading = advised(ways, gpu_memory_bytes=room, host_memory_bytes=host_memory_bytes)
    kept = sum(h.rounded for h in (states.parameters, states.optimizer, states.communication, states.buffers))
    if plan.backend == "deepspeed":  # a buffer that is never given back
        kept += states.gradients.rounded
    saving = _advised_saving(saves, room - kept, host.steady, host_memory_bytes)
    first = _first_step(profile, plan, states, phase_peaks)
    phases = {
        "load": PhasePeak(gpu_bytes=loading.gpu_bytes, host_bytes_per_node=loading.host_bytes_per_node),
        "first_step": PhasePeak(gpu_bytes=first, host_bytes_per_node=host.steady),
        "steady_step": PhasePeak(gpu_bytes=_highest(phase_peaks), host_bytes_per_node=host.steady),
        "save": PhasePeak(
            gpu_bytes=kept + saving.gpu_bytes, host_bytes_per_node=host.steady + saving.host_bytes_per_node
        ),
    }
    return JobPeaks(
        phases=phases,
        loading=loading,
        saving=saving,
        loadings=ways,
        savings=saves,
        fails=next((name for name, peak in phases.items() if not peak.fits(room, host_memory_bytes)), None),
    )


def loading_of(profile: Profile, plan: Plan, gpu: Gpu, overhead: DeviceOverhead) -> Loading:
    """The way of loading that the job is taken to have, where its nodes have room for everything."""
    return advised(_ways(profile, plan, gpu), gpu_memory_bytes=gpu.memory_bytes - overhead.middle_bytes)


def _ways(profile: Profile, plan: Plan, gpu: Gpu) -> tuple[Loading, ...]:
    return _loadings(profile, plan.any_step, flattens_on_gpu(profile, plan, gpu.memory_bytes))


@lru_cache(maxsize=1024)
def _loadings(profile: Profile, plan: Plan, on_gpu: bool) -> tuple[Loading, ...]:
    return loadings(profile, plan, on_gpu=on_gpu)


@lru_cache(maxsize=1024)
def _savings(profile: Profile, plan: Plan) -> tuple[Saving, ...]:
    return savings(profile, plan)


def _highest(phase_peaks: Mapping[str, int] | None) -> int | None:
    return max(phase_peaks.values()) if phase_peaks else None


def _first_step(profile: Profile, plan: Plan, states: States, phase_peaks: Mapping[str, int] | None) -> int | None:
    """The steady step's phases with the optimizer's state born in the last; DeepSpeed's masters are there before."""
    if not phase_peaks:
        return None
    unborn = deepspeed_moments(profile, plan) if plan.backend == "deepspeed" else states.optimizer.rounded
    return max(n_bytes - (0 if phase == "optimizer" else unborn) for phase, n_bytes in phase_peaks.items())


def _advised_saving(ways: tuple[Saving, ...], room: int, host: int, host_memory_bytes: int | None) -> Saving:
    """The usual way, unless it does not fit and another does."""
    for way in ways:
        on_host = host_memory_bytes is None or host + way.host_bytes_per_node <= host_memory_bytes
        if way.gpu_bytes <= room and on_host:
            return way
    return ways[0]
