"""A case: one job on one rung. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation.records import Rung

Device = Literal["cuda", "cpu"]

TIMEOUT_SECONDS: dict[str, float] = {"simulate": 600, "stand-in": 300, "measure": 1800}
"""How long a case may take where nothing else is said; loading dominates."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run and how.

    `snapshot` is where PyTorch's memory history goes; `zero1` who does ZeRO-1; `rdzv_endpoint` (HOST:PORT) where the nodes of
    a measurement on several of them meet, the same command being given on each.
    """

    request: EstimateRequest
    rung: Rung
    device: Device
    timeout_seconds: float
    snapshot: Path | None = None
    zero1: Literal["deepspeed", "torch"] = "deepspeed"
    rdzv_endpoint: str | None = None
