"""A case: one job validated in one mode. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation.choices import Device, Mode

Zero1 = Literal["deepspeed", "torch"]
"""The implementation of ZeRO-1: DeepSpeed, or torch.distributed.optim.ZeroRedundancyOptimizer under DDP."""

DEFAULT_TIMEOUT_SECONDS: dict[Mode, float] = {"simulate": 600, "stand-in": 300, "measure": 1800}
"""The default time limit of each mode. Most of the time is loading."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run, and how.

    `timeout_seconds`: None means the mode's default. `snapshot`: the file for PyTorch's memory history. `rdzv_endpoint`
    (HOST:PORT): the rendezvous of a measurement on several nodes, where each node runs the same command.
    """

    request: EstimateRequest
    mode: Mode
    device: Device
    timeout_seconds: float | None = None
    snapshot: Path | None = None
    zero1: Zero1 = "deepspeed"
    rdzv_endpoint: str | None = None

    @property
    def time_limit_seconds(self) -> float:
        """Seconds after which the case is ended."""
        return self.timeout_seconds or DEFAULT_TIMEOUT_SECONDS[self.mode]


def uses_zero_redundancy_optimizer(plan: Plan, zero1: Zero1) -> bool:
    """Whether the case runs torch's ZeroRedundancyOptimizer, which the estimate does not model."""
    return plan.strategy == "zero1" and zero1 == "torch"
