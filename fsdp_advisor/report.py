"""The answer, as data. Bytes are `int`; what is not known is None and named in `not_modelled`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_advisor.memory.device import DeviceOverhead
from fsdp_advisor.memory.job import JobPeaks
from fsdp_advisor.memory.ledger import Point
from fsdp_advisor.plan import Plan, label
from fsdp_advisor.request import EstimateRequest
from fsdp_advisor.speed import StepTime

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One strategy's figures on rank 0, which holds the largest shard.

    `fits` compares the best known figure, named by `fits_by`, with the GPU's memory; None where nothing known decides it.
    `states` are the bytes kept from step to step; `at_peak` the bytes alive at the highest moment, by account.
    """

    plan: Plan
    fits: bool | None
    fits_by: str
    peak_tensor_bytes: int | None
    peak_phase: str | None
    peak_where: str | None
    phase_peaks: dict[str, int] | None
    states: dict[str, int]
    at_peak: dict[str, int] | None
    headroom_bytes: int | None
    host_bytes_per_node: int
    host_loading_bytes_per_node: dict[str, int] | None
    fused_loss_peak_bytes: int | None
    step: StepTime | None = None
    overhead: DeviceOverhead | None = None
    job: JobPeaks | None = None
    warnings: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    timeline: tuple[Point, ...] = field(default=(), repr=False)

    @property
    def needed_bytes(self) -> int | None:
        """The best known figure of what the GPU must hold: the one that `fits_by` names, None where no peak is known."""
        return self.peak_tensor_bytes

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
            "headroom_bytes": self.headroom_bytes,
            "peak_tensor_bytes": self.peak_tensor_bytes,
            "peak_allocated_bytes": None,
            "peak_reserved_bytes": None,
            "peak_device_bytes": None,
            "peak_phase": self.peak_phase,
            "peak_where": self.peak_where,
            "phase_peaks": self.phase_peaks,
            "states": self.states,
            "at_peak": self.at_peak,
            "fused_loss_peak_bytes": self.fused_loss_peak_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "host_loading_bytes_per_node": self.host_loading_bytes_per_node,
            **_speed(self.step),
            **_job(self.overhead, self.job),
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


def _job(overhead: DeviceOverhead | None, job: JobPeaks | None) -> dict[str, Any]:
    """The keys of a job's phases and of what CUDA and NCCL take beside PyTorch; null for a bare parameter count."""
    ends = None if overhead is None else [overhead.low_bytes, overhead.high_bytes]
    return {
        "device_overhead_bytes_range": ends,
        "job_peaks": None if job is None else job.as_dict(),
        "fails_in": None if job is None else job.fails,
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
    notes: tuple[str, ...] = ()

    @property
    def any_fits(self) -> bool:
        return any(e.fits for e in self.estimates)

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The contract's JSON document."""
        request = self.request.model_dump()
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
