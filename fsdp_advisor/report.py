"""The answer, as data. Bytes are `int`; what is not known is None and named in `not_modelled`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_advisor.engines.job_peaks import JobPeaks
from fsdp_advisor.job.plan import Plan, label
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.device import BESIDE, DeviceOverhead, Verdict
from fsdp_advisor.memory.ledger import ACCOUNTS, Point
from fsdp_advisor.memory.libraries import Allocated
from fsdp_advisor.timing import StepTime

if TYPE_CHECKING:
    from fsdp_advisor.memory.allocator import Reserved

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One strategy's figures on rank 0, which holds the largest shard.

    `fits` compares `needed_bytes` with the GPU's memory: the best known figure, which `fits_by` names, and the middle of what
    CUDA and NCCL take beside it. Both are None where nothing known decides it.
    `states` are the bytes kept from step to step; `at_peak` the bytes alive at the highest moment, by account.
    """

    plan: Plan
    fits: bool | None
    fits_by: str
    needed_bytes: int | None
    headroom_bytes: int | None
    peak_tensor_bytes: int | None
    peak_phase: str | None
    peak_where: str | None
    phase_peaks: dict[str, int] | None
    states: dict[str, int]
    at_peak: dict[str, int] | None
    host_bytes_per_node: int
    host_loading_bytes_per_node: dict[str, int] | None
    fused_loss_peak_bytes: int | None
    allocated: Allocated | None = None
    reserved: Reserved | None = None
    verdict: Verdict | None = None
    step: StepTime | None = None
    overhead: DeviceOverhead | None = None
    job: JobPeaks | None = None
    warnings: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    replay_timeline: Callable[[bool], tuple[Point, ...]] | None = field(default=None, repr=False, compare=False)

    @property
    def timeline(self) -> tuple[Point, ...]:
        """The step's tensors, stretch by stretch; empty where their peak is not known. Made when asked for, which few do."""
        return () if self.replay_timeline is None else self.replay_timeline(False)

    @property
    def timeline_on_gpu(self) -> tuple[Point, ...]:
        """The same of a GPU's step, with kernels' scratch."""
        return () if self.replay_timeline is None else self.replay_timeline(True)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """`max_memory_allocated`: of whole blocks where the allocator was walked, else of each storage rounded up to 512."""
        if self.reserved is not None:
            return self.reserved.allocated_peak_bytes
        return None if self.allocated is None else self.allocated.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """`max_memory_reserved`, None where the allocator was not walked."""
        return None if self.reserved is None else self.reserved.reserved_peak_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """What nvidia-smi shows: reserved, and the middle of what CUDA and NCCL take."""
        return None if self.reserved is None else self.needed_bytes

    @property
    def needed_breakdown(self) -> dict[str, int] | None:
        """What `needed_bytes` is made of: by account the tensors alive at a GPU's peak, then what lies beside them (BESIDE).

        `fragmentation` stands there only where the allocator was walked. None where no peak is known.
        """
        taken, overhead = self.allocated, self.overhead
        if taken is None or overhead is None:
            return None
        parts = dict(zip(ACCOUNTS, taken.step.at_peak, strict=False))
        parts["libraries"] = taken.scratch_bytes + taken.workspace_bytes
        if self.reserved is not None:
            parts["fragmentation"] = self.reserved.reserved_peak_bytes - taken.peak_bytes
        parts["cuda_and_nccl"] = overhead.middle_bytes
        return parts

    @property
    def kept_bytes(self) -> int:
        """What stays on the GPU from step to step."""
        return sum(self.states.values())

    @property
    def label(self) -> str:
        """How people name the strategy: `ZeRO-3 + optimizer offload`."""
        return label(self.plan.strategy, self.plan.offload)

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The contract's JSON object."""
        result: dict[str, Any] = {
            "strategy": self.plan.strategy,
            "backend": self.plan.backend,
            "offload": self.plan.offload,
            "fits": self.fits,
            "fits_by": self.fits_by,
            "needed_bytes": self.needed_bytes,
            "needed_breakdown": None
            if (parts := self.needed_breakdown) is None
            else dict.fromkeys((*ACCOUNTS, *BESIDE)) | parts,
            "headroom_bytes": self.headroom_bytes,
            "peak_tensor_bytes": self.peak_tensor_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            **_device(self),
            "peak_phase": self.peak_phase,
            "peak_where": self.peak_where,
            "phase_peaks": self.phase_peaks,
            "states": self.states,
            "at_peak": self.at_peak,
            "fused_loss_peak_bytes": self.fused_loss_peak_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "host_loading_bytes_per_node": self.host_loading_bytes_per_node,
            **_speed(self.step),
            "job_peaks": None if self.job is None else self.job.as_dict(),
            "fails_in": None if self.job is None else self.job.fails,
            "warnings": list(self.warnings),
            "not_modelled": list(self.not_modelled),
        }
        if timeline:
            result["timeline"] = [
                {
                    "phase": p.phase,
                    "where": p.where,
                    "live_bytes": p.live_bytes,
                    "high_bytes": p.high_bytes,
                    "repeats": p.repeats,
                }
                for p in self.timeline
            ]
        return result


def _device(estimate: StrategyEstimate) -> dict[str, Any]:
    """What lies between tensors and the device's memory; null where it is not known."""
    allocated, reserved, overhead = estimate.allocated, estimate.reserved, estimate.overhead
    ends = None
    if reserved is not None and estimate.verdict is not None:
        ends = [estimate.verdict.least_bytes, estimate.verdict.most_bytes]
    parts = None
    if allocated is not None:
        parts = {
            "tensors": allocated.tensor_bytes,
            "kernel_scratch": allocated.scratch_bytes,
            "cublas_workspaces": allocated.workspace_bytes,
        }
    walked = None
    if reserved is not None:
        walked = {
            "verdict": reserved.verdict,
            "retries_per_step": reserved.retries_per_step,
            "expandable_segments_help": reserved.expandable_segments_help,
            "steps_until_steady": reserved.steps_until_steady,
        }
    return {
        "peak_device_bytes_range": ends,
        "allocated_breakdown": parts,
        "allocator": walked,
        "device_overhead_bytes_range": None if overhead is None else [overhead.low_bytes, overhead.high_bytes],
    }


def _speed(step: StepTime | None) -> dict[str, Any]:
    """The keys of a step's time; all null where it is not known."""
    if step is None:
        figures = ("tokens_per_second_per_gpu", "step_seconds", "mfu", "exposed_communication_share")
        return dict.fromkeys([*figures, *(f"{name}_range" for name in figures), "step_breakdown"])
    return {
        "tokens_per_second_per_gpu": round(step.tokens_per_second_per_gpu, 1),
        "step_seconds": step.seconds,
        "mfu": round(step.mfu, 4),
        "exposed_communication_share": round(step.exposed_communication_share, 4),
        "step_seconds_range": [step.low_seconds, step.high_seconds],
        "tokens_per_second_per_gpu_range": [round(value, 1) for value in step.tokens_per_second_range],
        "mfu_range": [round(value, 4) for value in step.mfu_range],
        "exposed_communication_share_range": [round(value, 4) for value in step.exposed_communication_share_range],
        "step_breakdown": step.breakdown,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer to one request."""

    request: EstimateRequest
    seq_len: int
    model_name: str
    model_source: str
    parameters: int
    trainable_parameters: int
    gpu_name: str
    gpu_memory_bytes: int
    estimates: tuple[StrategyEstimate, ...]
    task: str | None = None
    layer_classes: tuple[str, ...] = ()
    largest_parameter_elements: int | None = None
    hidden_size: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def any_fits(self) -> bool:
        return any(e.fits for e in self.estimates)

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The contract's JSON document."""
        request = self.request.as_dict()
        request |= {"seq_len": self.seq_len, "gpu": self.gpu_name}
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "name": self.model_name,
                "source": self.model_source,
                "parameters": self.parameters,
                "trainable_parameters": self.trainable_parameters,
            },
            "request": request,
            "gpu": {"name": self.gpu_name, "memory_bytes": self.gpu_memory_bytes},
            "estimates": [e.as_dict(timeline=timeline) for e in self.estimates],
            "recommendation": None,
            "notes": list(self.notes),
        }
