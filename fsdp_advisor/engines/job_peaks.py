"""Peaks of the phases of a job on a GPU and on a node's host: load, first step, steady step, evaluate, save; GRPO's steps have phases of
their own.

A job whose steps fit may still run out of memory before its first step or at its first checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_advisor.engines import rollouts
from fsdp_advisor.engines.deepspeed.partitions import optimizer_states
from fsdp_advisor.engines.loading import choose_load_method, load_methods
from fsdp_advisor.engines.merging import merge_method
from fsdp_advisor.engines.reference import gathered_bytes, loading_bytes, loads_copy
from fsdp_advisor.engines.registry import states_of
from fsdp_advisor.engines.saving import choose_save_method, save_methods
from fsdp_advisor.engines.transfer import LoadMethod, SaveMethod
from fsdp_advisor.engines.vllm import VllmShare, vllm_share
from fsdp_advisor.errors import assert_never
from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import DeviceOverhead
from fsdp_advisor.memory.live import StepPeak
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.accounts import JobPhase
from fsdp_advisor.program.storages import States

OUTSIDE_STEPS: tuple[JobPhase, ...] = ("load", "generate", "evaluate", "save")
"""The phases whose peak is not (or not only) computed from the program of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak bytes of one phase: tensors on one GPU, and host memory of the node that runs rank 0. None: unknown."""

    gpu_bytes: int | None
    host_bytes_per_node: int | None

    def fits(self, gpu_memory_bytes: int, host_memory_bytes: int | None) -> bool:
        """Whether the phase needs at most these bytes. A phase whose bytes are unknown fits.

        `gpu_memory_bytes`: the GPU's memory less the middle of what CUDA and NCCL take, as in the row's `needed_bytes`.
        `host_memory_bytes`: memory of one node, None if unlimited.
        """
        if self.gpu_bytes is not None and self.gpu_bytes > gpu_memory_bytes:
            return False
        if self.host_bytes_per_node is None or host_memory_bytes is None:
            return True
        return self.host_bytes_per_node <= host_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPeaks:
    """Peaks of a job's phases, the load and save methods assumed for them, and all methods of the plan's backend.

    `merge`: how adapters are merged after training, None if there are none to merge; `merge_peak` is its peak. `fails`:
    the first phase that does not fit (`PhasePeak.fits`), None if there is none. Generation does not either if vLLM cannot start in its
    share of the GPU (`vllm`).
    """

    phases: Mapping[JobPhase, PhasePeak]
    load_method: LoadMethod
    save_method: SaveMethod
    load_methods: tuple[LoadMethod, ...]
    save_methods: tuple[SaveMethod, ...]
    merge: SaveMethod | None
    merge_peak: PhasePeak | None
    fails: JobPhase | None
    vllm: VllmShare | None = None

    @property
    def worst_outside_steps(self) -> JobPhase:
        """The phase outside the steps that needs most of the GPU."""
        return max(OUTSIDE_STEPS, key=self._gpu_bytes_in)

    @property
    def bytes_outside_steps(self) -> int:
        """GPU bytes of the phase `worst_outside_steps`; 0 if there is none."""
        return self._gpu_bytes_in(self.worst_outside_steps)

    def _gpu_bytes_in(self, name: JobPhase) -> int:
        return (self.phases[name].gpu_bytes or 0) if name in self.phases else 0

    def as_dict(self) -> dict[str, Any]:
        """The JSON's `job_peaks`: GPU and host bytes by phase. Loading, saving and merging also have their method, saving and
        merging also their files.
        """
        methods: dict[str, LoadMethod | SaveMethod] = {"load": self.load_method, "save": self.save_method}
        found = {str(name): _as_json(peak, methods.get(name)) for name, peak in self.phases.items()}
        return found if self.merge_peak is None else found | {"merge": _as_json(self.merge_peak, self.merge)}


def _as_json(peak: PhasePeak, method: LoadMethod | SaveMethod | None) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu_bytes": peak.gpu_bytes, "host_bytes_per_node": peak.host_bytes_per_node}
    if method is not None:
        found |= {"way": method.way, "how": method.how}
    if isinstance(method, SaveMethod):
        found["files"] = [{"name": f.name, "count": f.count, "tensor_bytes": f.tensor_bytes} for f in method.files]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory that a job may use: of a GPU, less what CUDA and NCCL take there, and of a node's host (None: unlimited)."""

    gpu: Gpu
    overhead: DeviceOverhead
    host_memory_bytes: int | None = None

    @property
    def for_tensors_bytes(self) -> int:
        """GPU bytes that are left for tensors."""
        return self.gpu.memory_bytes - self.overhead.middle_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """The peaks of a steady step, of the first step if it runs other code, and of evaluation in bytes; None if unknown."""

    steady: StepPeak | None = None
    first: StepPeak | None = None
    evaluation_bytes: int | None = None


def job_peaks(
    profile: Profile, plan: Plan, limits: Limits, steps: StepPeaks, *, states: States, host: int | None
) -> JobPeaks:
    """Peaks of the phases of `plan`. `host`: bytes that a node's host keeps in steps, None if unknown.

    The job saves between two steps, while its states stay in memory.
    """
    gpu, available, host_memory_bytes = limits.gpu, limits.for_tensors_bytes, limits.host_memory_bytes
    loads = load_methods(profile, plan, gpu_memory_bytes=gpu.memory_bytes)
    saves = save_methods(profile, plan)
    load = choose_load_method(loads, gpu_memory_bytes=available, host_memory_bytes=host_memory_bytes)
    kept = bytes_between_steps(plan, states)
    save = choose_save_method(
        saves,
        gpu_memory_bytes=available - kept,
        host_memory_bytes=None if host_memory_bytes is None or host is None else host_memory_bytes - host,
    )
    steady = steps.steady
    by_tape_phase = None if steady is None else steady.tape_phase_peaks
    on_gpu: dict[JobPhase, int | None] = {
        "first_step": _first_step_peak(profile, plan, states, steps.first or steady),
        "steady_step": None if steady is None else steady.peak,
        **rollouts.phase_bytes(profile, plan, gpu, kept, by_tape_phase),
        **({} if plan.evaluation is None else {"evaluate": steps.evaluation_bytes}),
    }
    phases: dict[JobPhase, PhasePeak] = {
        "load": PhasePeak(gpu_bytes=_loading_peak(profile, plan, load), host_bytes_per_node=load.host_bytes_per_node),
        **{name: PhasePeak(gpu_bytes=n, host_bytes_per_node=host) for name, n in on_gpu.items()},
        "save": PhasePeak(
            gpu_bytes=kept + save.gpu_bytes,
            host_bytes_per_node=None if host is None else host + save.host_bytes_per_node,
        ),
    }
    merge = merge_method(profile, plan)
    vllm = vllm_share(profile, plan, gpu)
    fits = {name: peak.fits(available, host_memory_bytes) for name, peak in phases.items()}
    if vllm is not None and vllm.missing_bytes:
        fits["generate"] = False
    return JobPeaks(
        phases=phases,
        merge=merge,
        merge_peak=None if merge is None else _merge_peak(merge, plan, kept, host or 0),
        load_method=load,
        save_method=save,
        load_methods=loads,
        save_methods=saves,
        fails=next((name for name, phase_fits in fits.items() if not phase_fits), None),
        vllm=vllm,
    )


def _merge_peak(merge: SaveMethod, plan: Plan, kept_bytes: int, host_bytes: int) -> PhasePeak:
    """The peak of merging: in the training process while its states stay, or on the host after it has ended."""
    if plan.backend == "ddp":
        return PhasePeak(
            gpu_bytes=kept_bytes + merge.gpu_bytes, host_bytes_per_node=host_bytes + merge.host_bytes_per_node
        )
    return PhasePeak(gpu_bytes=0, host_bytes_per_node=merge.first_rank_host_bytes)


def _loading_peak(profile: Profile, plan: Plan, load: LoadMethod) -> int:
    """Peak before training: of loading the model, and of a copy as the reference. The copy is loaded first and stays, or computes its
    log-probabilities and is freed.
    """
    if not loads_copy(plan):
        return load.gpu_bytes
    copied = loading_bytes(profile, plan)
    if plan.reference == "none":
        return max(load.gpu_bytes, copied, gathered_bytes(profile, plan) or 0)
    kept = states_of(profile, plan).parameters.rounded
    kept -= states_of(profile, replace(plan, reference="none")).parameters.rounded
    return max(load.gpu_bytes + kept, copied)


def bytes_between_steps(plan: Plan, states: States) -> int:
    """Bytes that a rank keeps on the GPU between two steps. DeepSpeed and CUDA graphs never free their gradients."""
    kept = states.parameters + states.optimizer + states.communication + states.buffers
    match plan.backend:
        case "ddp" | "fsdp1" | "fsdp2":
            return (kept + states.gradients if plan.captures_graph else kept).rounded
        case "deepspeed":
            return (kept + states.gradients).rounded
        case _:
            return assert_never(plan.backend)


def _first_step_peak(profile: Profile, plan: Plan, states: States, tensors: StepPeak | None) -> int | None:
    """Peak of the first step. Forward and backward run before the optimizer's step creates the optimizer states."""
    if tensors is None:
        return None
    not_yet = _bytes_made_by_first_optimizer_step(profile, plan, states)
    return max(n_bytes if phase == "optimizer" else n_bytes - not_yet for phase, n_bytes in tensors.phase_peaks.items())


def _bytes_made_by_first_optimizer_step(profile: Profile, plan: Plan, states: States) -> int:
    match plan.backend:
        case "ddp" | "fsdp1" | "fsdp2":
            return states.optimizer.rounded
        case "deepspeed":
            return optimizer_states(profile, plan).moments.rounded
        case _:
            return assert_never(plan.backend)
