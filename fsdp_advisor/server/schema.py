"""The answers' JSON, described once: what /openapi.json says of them. A test holds it against every kind of real answer.

Keys may be added to an answer, never renamed; readers are to ignore what they do not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fsdp_advisor.job.request import Backend, EstimateRequest, Offload, RecommendRequest, Strategy
from fsdp_advisor.server.request_models import model_of

Bytes = Annotated[int, Field(ge=0)]
Phase = Literal["forward", "backward", "optimizer"]
_Estimated: Any = model_of(EstimateRequest)
_Searched: Any = model_of(RecommendRequest)


class Model(BaseModel):
    """What is trained."""

    name: str
    source: Literal["catalog", "config", "hub", "count"]
    parameters: int
    trainable_parameters: int


class GpuMemory(BaseModel):
    """What it is trained on."""

    name: str
    memory_bytes: Bytes


class Moment(BaseModel):
    """One point of a step's timeline: live bytes at its end, the highest since the point before, and how often it recurs."""

    phase: Phase
    where: str
    live_bytes: Bytes
    high_bytes: Bytes
    repeats: int


Seconds = Annotated[float, Field(ge=0)]


class PhasePeak(BaseModel):
    """A phase of the job at its highest."""

    gpu_bytes: Bytes | None
    host_bytes_per_node: Bytes | None
    way: Annotated[str | None, Field(description="Which of the ways to load or to save the figures are of")] = None
    how: str | None = None
    files: list[dict[str, Any]] | None = None


class Allocator(BaseModel):
    """What a walk of the job's steps through PyTorch's caching allocator found."""

    verdict: Literal["fits", "fits_with_retries", "does_not_fit"] | None
    retries_per_step: int
    expandable_segments_help: bool | None
    steps_until_steady: int | None


class StrategyEstimate(BaseModel):
    """One strategy's figures on rank 0, which holds the largest shard. null: not known; `not_modelled` says why."""

    strategy: Strategy
    backend: Backend
    offload: Offload
    fits: bool | None
    fits_by: Annotated[str, Field(description="The figure behind `needed_bytes`")]
    needed_bytes: Annotated[Bytes | None, Field(description="What `fits` compares with the GPU's memory")]
    needed_breakdown: Annotated[
        dict[str, Bytes | None] | None,
        Field(description="What `needed_bytes` is made of: tensors on a GPU by account, and what lies beside them"),
    ]
    headroom_bytes: int | None
    peak_tensor_bytes: Annotated[Bytes | None, Field(description="Live tensor storages")]
    peak_allocated_bytes: Annotated[Bytes | None, Field(description="torch.cuda.max_memory_allocated")]
    peak_reserved_bytes: Annotated[Bytes | None, Field(description="torch.cuda.max_memory_reserved; with `reserved`")]
    peak_device_bytes: Annotated[Bytes | None, Field(description="What nvidia-smi shows; with `reserved`")]
    peak_device_bytes_range: list[Bytes] | None
    allocated_breakdown: dict[str, Bytes] | None
    allocator: Allocator | None
    device_overhead_bytes_range: Annotated[list[Bytes] | None, Field(description="CUDA context and NCCL")]
    peak_phase: Phase | None
    peak_where: str | None
    phase_peaks: Annotated[dict[str, Bytes] | None, Field(description="The highest moment of each phase")]
    states: Annotated[dict[str, Bytes], Field(description="Bytes kept from step to step")]
    at_peak: Annotated[dict[str, Bytes] | None, Field(description="Bytes alive at the highest moment, by account")]
    fused_loss_peak_bytes: Bytes | None
    host_bytes_per_node: Bytes | None
    host_loading_bytes_per_node: dict[str, Bytes] | None
    tokens_per_second_per_gpu: Seconds | None
    step_seconds: Seconds | None
    mfu: Seconds | None
    exposed_communication_share: Seconds | None
    step_seconds_range: list[Seconds] | None
    tokens_per_second_per_gpu_range: list[Seconds] | None
    mfu_range: list[Seconds] | None
    exposed_communication_share_range: list[Seconds] | None
    step_breakdown: Annotated[dict[str, Seconds] | None, Field(description="Seconds by cause; they sum to the step")]
    job_peaks: Annotated[dict[str, PhasePeak] | None, Field(description="Load, first step, steady step, save")]
    fails_in: str | None
    warnings: list[str]
    not_modelled: list[str]
    timeline: Annotated[list[Moment] | None, Field(description="With `explain` alone")] = None


class Estimate(BaseModel):
    """The answer to one job."""

    schema_version: Literal[1]
    model: Model
    request: Annotated[_Estimated, Field(description="The job, with everything resolved")]
    gpu: GpuMemory
    estimates: list[StrategyEstimate]
    recommendation: dict[str, Any] | None
    notes: list[str]


class Advice(Estimate):
    """The answer to a job of which some things were open: the report with the estimate's defaults, and what to take."""

    request: Annotated[_Searched, Field(description="The job, with what is open")]


class ModelRow(BaseModel):
    """One model of the catalog."""

    id: str
    aliases: list[str]
    task: str
    parameters: int
    max_seq_len: int | None
    model_type: str
    source: str
    experts: Annotated[int | None, Field(description="Experts that a layer chooses among; null of a dense model")]
