"""One strategy, fully decided: what the arithmetic works on. No validation here; `request.py` has done it."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job on rank 0: `shard_degree` ranks share one copy of the states, `replica_degree` copies exist."""

    strategy: str
    backend: str
    offload: str = "none"
    offload_device: str = "cpu"
    shard_degree: int
    replica_degree: int = 1
    nnodes: int = 1
    precision: str = "bf16-mixed"
    optim: str = "adamw_torch_fused"
    micro_batch_size: int = 1
    seq_len: int
    gradient_accumulation_steps: int = 1
    activation_checkpointing: str = "none"
    attention: str = "sdpa"
    backward_prefetch: str = "pre"

    @property
    def world_size(self) -> int:
        return self.shard_degree * self.replica_degree

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    @property
    def mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def param_bytes(self) -> int:
        """Bytes per element of the parameters an optimizer steps (fp32 masters under mixed precision)."""
        return 2 if self.precision == "bf16" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in which forward and backward compute."""
        return 4 if self.precision == "fp32" else 2
