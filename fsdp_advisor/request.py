"""The question, as data: every option of the command line, of the REST API and of `estimate()`, under the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fsdp_advisor.units import parse_bytes, parse_count

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Backend = Literal["ddp", "fsdp2", "fsdp1", "deepspeed"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"]
Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit",
]  # fmt: skip
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Checkpointing = Literal["none", "full"]
Framework = Literal["torch", "accelerate", "trainer", "deepspeed"]

MAX_GPUS = 65_536
MAX_BATCH = 1_048_576
MAX_SEQ_LEN = 16_777_216


class EstimateRequest(BaseModel):
    """One job, or one job under every strategy. Field names are the command line's options with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS, description="total ranks")] = 1
    nnodes: Annotated[int, Field(ge=1, le=MAX_GPUS, description="nodes")] = 1
    gpu: Annotated[str | None, Field(max_length=128, description="a name, or a size such as 24GiB")] = None
    interconnect: Annotated[
        str | None, Field(max_length=128, description="a name such as InfiniBand NDR, or a rate such as 400Gb/s")
    ] = None
    strategy: Literal[Strategy, "all"] = "all"
    backend: Literal[Backend, "auto"] = "auto"
    offload: Offload = "none"
    offload_device: Literal["cpu", "nvme"] = "cpu"
    precision: Precision = "bf16-mixed"
    optim: Optimizer = "adamw_torch_fused"
    micro_batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH, description="sequences per rank per forward")] = 1
    seq_len: Annotated[int | None, Field(ge=1, le=MAX_SEQ_LEN, description="tokens per sequence")] = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 1
    activation_checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    reserved: Annotated[bool, Field(description="walk the caching allocator through the job's steps")] = False
    allocator_conf: Annotated[str | None, Field(max_length=1024, description="as in PYTORCH_ALLOC_CONF")] = None
    framework: Framework = "torch"
    wrap: Literal["layer", "none"] = "layer"

    @model_validator(mode="before")
    @classmethod
    def _forgive(cls, values: Any) -> Any:
        """Words are taken without regard to case and to blanks around them."""
        if not isinstance(values, dict):
            return values
        return {
            name: (
                value.strip() if name in ("model", "gpu", "interconnect", "allocator_conf") else value.strip().lower()
            )
            if isinstance(value, str)
            else value
            for name, value in values.items()
        }

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> EstimateRequest:
        if self.gpus % self.nnodes:
            raise ValueError(f"gpus {self.gpus} is not divisible by nnodes {self.nnodes}")
        return self


Find = Literal["gpus", "batch", "sequence", "gpu-type"]


def _reads(parse: Callable[[str], int | None]) -> BeforeValidator:
    """Text as `parse` reads it; what it cannot read is left for pydantic to refuse."""

    def read(value: Any) -> Any:
        number = parse(value) if isinstance(value, str) else value
        return value if number is None else number

    return BeforeValidator(read)


def _fraction(value: Any) -> Any:
    """`8%` as 0.08."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            return value
    return value


class RecommendRequest(EstimateRequest):
    """A job of which some things are still open: those in SEARCHED, wherever they are None, `auto` or `all`."""

    SEARCHED: ClassVar[tuple[str, ...]] = (
        "strategy", "backend", "offload", "offload_device",
        "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
    )  # fmt: skip

    model_config = ConfigDict(defer_build=True)  # the commands that only list its fields need no validator

    # mypy: wider than in an estimate, where nothing is open
    offload: Literal[Offload, "auto"] = "auto"  # type: ignore[assignment]
    offload_device: Literal["cpu", "nvme", "auto"] = "auto"  # type: ignore[assignment]
    micro_batch_size: Annotated[int | None, Field(ge=1, le=MAX_BATCH, description="sequences per rank")] = None  # type: ignore[assignment]
    gradient_accumulation_steps: Annotated[int | None, Field(ge=1, le=MAX_BATCH)] = None  # type: ignore[assignment]
    activation_checkpointing: Literal[Checkpointing, "auto"] = "auto"  # type: ignore[assignment]

    global_batch_size: Annotated[
        int | None, Field(ge=1, le=MAX_BATCH * MAX_GPUS, description="sequences per optimizer step, over all ranks")
    ] = None
    find: Annotated[Find | None, Field(description="what to find the largest or smallest of that fits")] = None
    margin: Annotated[
        float, BeforeValidator(_fraction), Field(ge=0, lt=1, description="of the GPU's memory, left free: 0.08 or 8%")
    ] = 0.08
    host_memory: Annotated[
        Annotated[int, Field(ge=2**30)] | None,
        _reads(parse_bytes),
        Field(description="of one node, such as 512GiB"),
    ] = None
    tokens: Annotated[
        Annotated[int, Field(ge=1, le=10**18)] | None,
        _reads(parse_count),
        Field(description="to train on, such as 10e9 or 10B"),
    ] = None
    price: Annotated[float | None, Field(ge=0, le=1e6, description="of one GPU for one hour, in any currency")] = None

    @property
    def as_estimate(self) -> EstimateRequest:
        """The same job with the estimate's defaults for what is open."""
        values = {name: getattr(self, name) for name in EstimateRequest.model_fields}
        return EstimateRequest(**{name: v for name, v in values.items() if v not in (None, "auto")})
