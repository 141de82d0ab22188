"""The question, as data: every option of the command line, of the REST API and of `estimate()`, under the same words."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Backend = Literal["ddp", "fsdp2", "fsdp1", "deepspeed"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"]
Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit",
]  # fmt: skip
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Checkpointing = Literal["none", "full"]

MAX_GPUS = 65_536
MAX_BATCH = 1_048_576
MAX_SEQ_LEN = 16_777_216


def _forgiving(value: object) -> object:
    """Options are matched without regard to case, and dashes stand for underscores where the word has them."""
    return value.strip().lower() if isinstance(value, str) else value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


class EstimateRequest(BaseModel):
    """One job, or one job under every strategy. Field names are the command line's options with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(max_length=4096), AfterValidator(_not_blank)]
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS, description="total ranks")] = 1
    nnodes: Annotated[int, Field(ge=1, le=MAX_GPUS, description="nodes")] = 1
    gpu: Annotated[str | None, Field(max_length=128, description="a name, or a size such as 24GiB")] = None
    strategy: Annotated[Literal[Strategy, "all"], BeforeValidator(_forgiving)] = "all"
    backend: Annotated[Literal[Backend, "auto"], BeforeValidator(_forgiving)] = "auto"
    offload: Annotated[Offload, BeforeValidator(_forgiving)] = "none"
    offload_device: Annotated[Literal["cpu", "nvme"], BeforeValidator(_forgiving)] = "cpu"
    precision: Annotated[Precision, BeforeValidator(_forgiving)] = "bf16-mixed"
    optim: Annotated[Optimizer, BeforeValidator(_forgiving)] = "adamw_torch_fused"
    micro_batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH, description="sequences per rank per forward")] = 1
    seq_len: Annotated[int | None, Field(ge=1, le=MAX_SEQ_LEN, description="tokens per sequence")] = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 1
    activation_checkpointing: Annotated[Checkpointing, BeforeValidator(_forgiving)] = "none"
    attention: Annotated[Attention, BeforeValidator(_forgiving)] = "sdpa"
    backward_prefetch: Annotated[Literal["pre", "post", "none"], BeforeValidator(_forgiving)] = "pre"

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> EstimateRequest:
        if self.gpus % self.nnodes:
            raise ValueError(f"gpus {self.gpus} is not divisible by nnodes {self.nnodes}")
        return self
