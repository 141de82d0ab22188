"""Will it fit, under which strategy, how fast, and what to type: memory of sharded transformer training, exactly.

>>> import fsdp_advisor
>>> report = fsdp_advisor.estimate(model="7e9", gpus=4, gpu="A100-40GB", precision="fp32", strategy="zero3")
>>> sum(report.estimates[0].states.values())
28000000000
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimate import estimate
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.request import EstimateRequest

if TYPE_CHECKING:
    from fsdp_advisor.tracing import record_module

__version__ = "0.1.0"
__all__ = ["AdvisorError", "EstimateRequest", "Report", "StrategyEstimate", "estimate", "record_module"]


def __getattr__(name: str) -> Any:
    """`record_module` needs torch, so it is imported when it is asked for."""
    if name == "record_module":
        from fsdp_advisor.tracing import record_module

        return record_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
