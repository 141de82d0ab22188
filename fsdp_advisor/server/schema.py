"""The answers' JSON, described once: what /openapi.json says of them. A test holds it against every kind of real answer.

Keys may be added to an answer, never renamed; readers are to ignore what they do not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fsdp_advisor.request import Backend, EstimateRequest, Offload, Strategy

Bytes = Annotated[int, Field(ge=0)]
Phase = Literal["forward", "backward", "optimizer"]


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


class StrategyEstimate(BaseModel):
    """One strategy's figures on rank 0, which holds the largest shard. null: not known; `not_modelled` says why."""

    strategy: Strategy
    backend: Backend
    offload: Offload
    fits: bool | None
    fits_by: Annotated[str, Field(description="The figure that `fits` compares with the GPU's memory")]
    headroom_bytes: int | None
    peak_tensor_bytes: Bytes | None
    peak_allocated_bytes: Bytes | None
    peak_reserved_bytes: Bytes | None
    peak_device_bytes: Bytes | None
    peak_phase: Phase | None
    peak_where: str | None
    phase_peaks: Annotated[dict[str, Bytes] | None, Field(description="The highest moment of each phase")]
    states: Annotated[dict[str, Bytes], Field(description="Bytes kept from step to step")]
    at_peak: Annotated[dict[str, Bytes] | None, Field(description="Bytes alive at the highest moment, by account")]
    fused_loss_peak_bytes: Bytes | None
    host_bytes_per_node: Bytes | None
    host_loading_bytes_per_node: dict[str, Bytes] | None
    tokens_per_second_per_gpu: Annotated[float, Field(ge=0)] | None
    step_seconds: Annotated[float, Field(ge=0)] | None
    warnings: list[str]
    not_modelled: list[str]
    timeline: Annotated[list[Moment] | None, Field(description="With `explain` alone")] = None


class Estimate(BaseModel):
    """The answer to one job."""

    schema_version: Literal[1]
    model: Model
    request: Annotated[EstimateRequest, Field(description="The job, with everything resolved")]
    gpu: GpuMemory
    estimates: list[StrategyEstimate]
    recommendation: dict[str, Any] | None
    notes: list[str]


class ModelRow(BaseModel):
    """One model of the catalog."""

    id: str
    aliases: list[str]
    task: str
    parameters: int
    max_seq_len: int | None
    model_type: str
    source: str
