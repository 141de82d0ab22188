"""Pydantic models of the answers' JSON, for /openapi.json. A test validates every kind of real answer with them.

Keys may be added, never renamed or removed. Readers must ignore keys they do not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fsdp_advisor.diagnosis.facts import MomentPhase
from fsdp_advisor.job.choices import Backend, Offload, Strategy
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.program.accounts import Phase
from fsdp_advisor.server.request_models import model_of

Bytes = Annotated[int, Field(ge=0)]
_Estimated: Any = model_of(EstimateRequest)
_Searched: Any = model_of(RecommendRequest)


class Adapters(BaseModel):
    """The adapters of a model: PEFT's name of the method, and the elements that they add."""

    method: str
    parameters: int


class Model(BaseModel):
    """The trained model."""

    name: str
    source: Literal["catalog", "config", "hub", "count"]
    parameters: int
    trainable_parameters: int
    adapters: Adapters | None


class GpuMemory(BaseModel):
    """The GPU it is trained on."""

    name: str
    memory_bytes: Bytes


class Moment(BaseModel):
    """One point of a step's timeline: live bytes at its end, and the maximum since the previous point."""

    phase: Phase
    where: str
    live_bytes: Bytes
    high_bytes: Bytes


Seconds = Annotated[float, Field(ge=0)]


class PhasePeak(BaseModel):
    """The peak of one phase of the job."""

    gpu_bytes: Bytes | None
    host_bytes_per_node: Bytes | None
    way: Annotated[str | None, Field(description="The method of loading or saving that the figures assume")] = None
    how: str | None = None
    files: list[dict[str, Any]] | None = None


class Allocator(BaseModel):
    """The result of simulating PyTorch's caching allocator over the job's steps."""

    verdict: Literal["fits", "fits_with_retries", "does_not_fit"] | None
    expandable_segments_help: bool | None
    steps_until_steady: int | None


class AllocatedPeaks(BaseModel):
    """Peaks of PyTorch's caching allocator."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes


class StrategyEstimate(BaseModel):
    """One strategy's figures on rank 0, which holds the largest shard. null: unknown; `not_modelled` says why."""

    strategy: Strategy
    backend: Backend
    offload: Offload
    fits: bool | None
    needed_bytes: Annotated[Bytes | None, Field(description="`fits` compares this with the GPU's memory")]
    needed_breakdown: Annotated[
        dict[str, Bytes | None] | None,
        Field(description="The parts of `needed_bytes`: tensors on a GPU by account, and other memory"),
    ]
    headroom_bytes: int | None
    peak_tensor_bytes: Annotated[Bytes | None, Field(description="Live tensor storages")]
    simulated_peak_bytes: Annotated[
        Bytes | None,
        Field(
            description="Peak of the same code under fake tensors on a CPU, without a GPU's kernels; null if recording it takes minutes,"
            " and in a search that would have to record it"
        ),
    ]
    peak_allocated_bytes: Annotated[Bytes | None, Field(description="torch.cuda.max_memory_allocated")]
    peak_reserved_bytes: Annotated[Bytes | None, Field(description="torch.cuda.max_memory_reserved")]
    peak_device_bytes: Annotated[Bytes | None, Field(description="Memory that nvidia-smi shows")]
    peak_device_bytes_range: list[Bytes] | None
    allocator: Allocator | None
    allocator_retries_per_step: Annotated[
        int | None, Field(description="How often a step frees cached memory and allocates again, which is slow")
    ]
    device_overhead_bytes_range: Annotated[list[Bytes] | None, Field(description="CUDA context and NCCL")]
    peak_phase: Phase | None
    peak_where: str | None
    phase_peaks: Annotated[dict[str, Bytes] | None, Field(description="The peak of each phase")]
    states: Annotated[
        dict[str, Bytes], Field(description="Bytes kept from step to step; of a bare parameter count by the textbook")
    ]
    kept_bytes: Annotated[
        Bytes,
        Field(
            description="Bytes that stay on the GPU from step to step: the sum of `states`, or what the backend keeps of a count"
        ),
    ]
    parameter_parts: Annotated[
        dict[str, Bytes] | None,
        Field(description="`states.parameters` divided into base and adapters; null without adapters"),
    ]
    at_peak: Annotated[dict[str, Bytes] | None, Field(description="Live bytes at the peak, by account")]
    fused_loss_peak_bytes: Bytes | None
    paged_optimizer_bytes: Annotated[
        Bytes,
        Field(
            description="Optimizer state in CUDA's managed memory: outside `needed_bytes`, counted in `host_bytes_per_node`"
        ),
    ] = 0
    host_bytes_per_node: Bytes | None
    host_loading_bytes_per_node: dict[str, Bytes] | None
    tokens_per_second_per_gpu: Seconds | None
    samples_per_second_per_gpu: Annotated[Seconds | None, Field(description="Sequences or images")]
    step_seconds: Seconds | None
    mfu: Annotated[
        Seconds | None,
        Field(
            description="Model FLOPs utilization as PaLM defines it (arXiv:2204.02311): attention counts in full, also under a causal mask "
            "whose kernel skips half of it, so it can exceed 1 for long sequences"
        ),
    ]
    exposed_communication_share: Seconds | None
    step_seconds_range: list[Seconds] | None
    tokens_per_second_per_gpu_range: list[Seconds] | None
    mfu_range: list[Seconds] | None
    exposed_communication_share_range: list[Seconds] | None
    step_breakdown: Annotated[dict[str, Seconds] | None, Field(description="Seconds by cause; they sum to the step")]
    evaluation: Annotated[
        AllocatedPeaks | None, Field(description="Steps with an evaluation between them; null without one")
    ] = None
    job_peaks: Annotated[
        dict[str, PhasePeak] | None,
        Field(description="Load, first step, steady step, evaluate, save, and merging adapters"),
    ]
    fails_in: str | None
    warnings: list[str]
    not_modelled: list[str]
    timeline: Annotated[list[Moment] | None, Field(description="Only with `explain`")] = None


class ConfigReading(BaseModel):
    """The reading of one configuration file of another tool."""

    file: str
    format: str
    read: list[str]
    ignored: list[str]
    unknown: list[str]
    not_modelled: list[str]
    assumed: list[str]
    missing: list[str]


class Estimate(BaseModel):
    """The answer to one job."""

    schema_version: Literal[1]
    model: Model
    request: Annotated[_Estimated, Field(description="The job, with everything resolved")]
    gpu: GpuMemory
    estimates: list[StrategyEstimate]
    recommendation: dict[str, Any] | None
    notes: list[str]
    config_files: list[ConfigReading]


class Advice(Estimate):
    """A recommendation: the report of the job with the estimate's defaults, and the recommended configuration."""

    request: Annotated[_Searched, Field(description="The requested job; null: the search chooses the value")]


class Check(BaseModel):
    """Whether a job fits."""

    fits: bool | None
    line: Annotated[str, Field(description="The verdict in words")]
    needed_bytes: Bytes | None
    headroom_bytes: int | None
    host_bytes_per_node: Bytes | None
    not_modelled: Annotated[list[str], Field(description="Settings of the configuration files that no figure contains")]
    unknown: Annotated[list[str], Field(description="Unknown keys of the configuration files")]
    assumed: Annotated[list[str], Field(description="What is assumed for settings that the files leave open")]
    notes: Annotated[list[str], Field(description="What is assumed and left out")]


class Difference(BaseModel):
    """Options that differ between two jobs, and the effect on job `a` if it takes the values of job `b` for these options only."""

    options: Annotated[dict[str, dict[str, Any]], Field(description="By option, the values `a` and `b`")]
    needed_bytes: Annotated[int | None, Field(description="The change of what one GPU needs")]
    step_time: Annotated[float | None, Field(description="The factor by which the time per token changes")]
    cures: Annotated[bool | None, Field(description="Whether `b`, which does not fit, fits with the values of `a`")]
    reason: Annotated[str | None, Field(description="Why the change alone is impossible")]


class Comparison(BaseModel):
    """Two jobs, and their differences with the largest effect first."""

    schema_version: Literal[1]
    a: Estimate
    b: Estimate
    differences: list[Difference]
    cure: Annotated[
        list[str], Field(description="Options whose values of `a` together make `b` fit, if none alone does")
    ]


class OutOfMemory(BaseModel):
    """One out-of-memory error, as PyTorch's message gives it."""

    rank: int | None
    gpu: int | None
    requested_bytes: Bytes | None
    total_bytes: Bytes | None
    free_bytes: Bytes | None
    allowed_bytes: Annotated[Bytes | None, Field(description="The process's limit, if it has one")]
    process_bytes: Annotated[Bytes | None, Field(description="Reserved memory, CUDA context and NCCL")]
    other_processes: Annotated[dict[str, Bytes], Field(description="Bytes by process id")]
    allocated_bytes: Bytes | None
    private_pool_bytes: Bytes
    unallocated_bytes: Annotated[Bytes | None, Field(description="Reserved, and in no tensor")]


class StepMoment(BaseModel):
    """A moment in the step. Layers and steps count from 1."""

    phase: MomentPhase
    layer: int | None
    layers: int | None
    step: int | None
    where: Annotated[str, Field(description="The line of code")]
    text: str


class Holding(BaseModel):
    """Tensors of one category that one line of code allocated."""

    category: str
    module: str
    where: str
    bytes: Bytes
    count: int
    largest_bytes: Bytes


class Change(BaseModel):
    """A change that makes the job fit, or saves memory."""

    what: str
    because: str
    options: Annotated[dict[str, Any], Field(description="Options of estimate, if the change is one of them")]
    saves_bytes: Annotated[Bytes | None, Field(description="What it can save at most")]


class CategoryDifference(BaseModel):
    """A category that differs from the estimate, and the tensors that make up most of it."""

    category: str
    measured_bytes: Bytes
    predicted_bytes: Bytes
    because: str
    holdings: list[Holding]


class Prediction(BaseModel):
    """The estimate of the job, for its worst moment and for the moment of the diagnosis."""

    job: str
    fits: bool | None
    needed_bytes: Bytes | None
    peak_at: str | None
    at_moment: Annotated[dict[str, Bytes], Field(description="Bytes by category")]
    moment: str
    differences: list[CategoryDifference]
    notes: list[str]


class Diagnosis(BaseModel):
    """What filled a GPU's memory, at which moment, and changes that make the job fit, the cheapest first."""

    schema_version: Literal[1]
    file: str
    source: Literal["error", "snapshot"]
    device: int | None
    moment: StepMoment
    out_of_memory: OutOfMemory | None
    memory: Annotated[dict[str, Bytes], Field(description="Bytes by category")]
    holdings: list[Holding]
    ranks: Annotated[list[OutOfMemory], Field(description="Every error of a log")]
    changes: list[Change]
    prediction: Prediction | None
    notes: list[str]
    unknown: Annotated[list[str], Field(description="What is unknown, and why")]


class ModelRow(BaseModel):
    """A model of the catalog."""

    id: str
    aliases: list[str]
    task: str
    parameters: int
    max_seq_len: int | None
    model_type: str
    source: str
    experts: Annotated[int | None, Field(description="Experts per layer; null for a dense model")]
