"""Estimates the memory and step time of sharded transformer training, recommends a strategy, and writes its launch files.

>>> import fsdp_advisor
>>> report = fsdp_advisor.estimate(model="7e9", gpus=4, gpu="A100-40GB", precision="fp32", strategy="zero3")
>>> sum(report.estimates[0].states.values())
28000000000
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_advisor.advice import Advice, recommend
    from fsdp_advisor.api import diagnose, export, gpus, models
    from fsdp_advisor.comparison import Comparison, compare
    from fsdp_advisor.diagnosis import Diagnosis
    from fsdp_advisor.errors import AdvisorError
    from fsdp_advisor.estimator import estimate
    from fsdp_advisor.job.request import EstimateRequest
    from fsdp_advisor.job.search_request import RecommendRequest
    from fsdp_advisor.recording import record_module
    from fsdp_advisor.report import Report
    from fsdp_advisor.strategy_estimate import StrategyEstimate

__version__ = "0.1.0"
__all__ = [
    "Advice",
    "AdvisorError",
    "Comparison",
    "Diagnosis",
    "EstimateRequest",
    "RecommendRequest",
    "Report",
    "StrategyEstimate",
    "compare",
    "diagnose",
    "estimate",
    "export",
    "gpus",
    "models",
    "recommend",
    "record_module",
]

_HOME = {
    "Advice": "advice",
    "AdvisorError": "errors",
    "Comparison": "comparison",
    "Diagnosis": "diagnosis",
    "EstimateRequest": "job.request",
    "RecommendRequest": "job.search_request",
    "Report": "report",
    "StrategyEstimate": "report",
    "compare": "comparison",
    "diagnose": "api",
    "estimate": "estimator",
    "gpus": "api",
    "models": "api",
    "recommend": "advice",
    "record_module": "api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a command imports only what it needs, and torch only if it must."""
    if name == "export":
        return import_module(f"{__name__}.export")  # the package, which can be called
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return __all__
