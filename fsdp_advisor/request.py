"""The question, as data: every option of the command line, of the REST API and of `estimate()`, under the same words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    framework: Framework = "torch"
    wrap: Literal["layer", "none"] = "layer"

    @model_validator(mode="before")
    @classmethod
    def _forgive(cls, values: Any) -> Any:
        """Words are taken without regard to case and to blanks around them."""
        if not isinstance(values, dict):
            return values
        return {
            name: (value.strip() if name in ("model", "gpu") else value.strip().lower())
            if isinstance(value, str)
            else value
            for name, value in values.items()
        }

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> EstimateRequest:
        if self.gpus % self.nnodes:
            raise ValueError(f"gpus {self.gpus} is not divisible by nnodes {self.nnodes}")
        return self
