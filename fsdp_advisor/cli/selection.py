"""The row that `--explain` names."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.render.view import row_name
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate


def select(report: Report, name: str) -> StrategyEstimate:
    """The row of that name, or the first row of that strategy. Raises UsageError.

    Case, blanks, dashes and underscores do not matter: ZeRO-3 is zero3.
    """
    wanted = "".join(c for c in name.lower() if c.isalnum() or c == "+")
    for estimate in report.estimates:
        if wanted in (row_name(estimate), f"{estimate.plan.strategy}+{estimate.plan.offload}"):
            return estimate
    for estimate in report.estimates:
        if wanted == estimate.plan.strategy:
            return estimate
    shown = ", ".join(row_name(e) for e in report.estimates)
    raise UsageError(f"--explain {name}: no such row in the answer", hint=f"the rows are {shown}")
