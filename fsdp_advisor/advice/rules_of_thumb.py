"""Rules of thumb that choose a strategy by the number of parameters, and whether their choice would run.

Introductions to FSDP and ZeRO give both: a decision tree by size, and a table of scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import StrategyChoice
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.gpu_support import backend_refusal
from fsdp_advisor.job.choices import Offload, Strategy
from fsdp_advisor.job.compatibility import label, plan_of_row, row_refusal
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.json_fields import json_fields
from fsdp_advisor.units import format_gib

BILLION = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """The strategy and offload that a rule gives for a model (None: the rule gives none), and whether they would run.

    `would_run` is None if that is unknown.
    """

    source: str
    strategy: Strategy | None
    offload: Offload | None
    would_run: bool | None
    because: str

    @property
    def says(self) -> str | None:
        return None if self.strategy is None else label(self.strategy, self.offload or "none")

    def as_dict(self) -> dict[str, Any]:
        return {"source": self.source, "says": self.says} | json_fields(self)


def decision_tree_by_size(parameters: int, ddp_runs: bool) -> tuple[Strategy, Offload] | None:
    """DDP up to 3B parameters, ZeRO-2 up to 13B, ZeRO-3 up to 70B, ZeRO-3 with offload above."""
    if parameters <= 3 * BILLION:
        return "ddp", "none"
    if parameters <= 13 * BILLION:
        return "zero2", "none"
    return ("zero3", "none") if parameters <= 70 * BILLION else ("zero3", "parameters")


def scenario_table(parameters: int, ddp_runs: bool) -> tuple[Strategy, Offload] | None:
    """DDP below 1B parameters; up to 7B DDP if it fits, else ZeRO-2; up to 30B ZeRO-3; from 70B ZeRO-3 with offload; else None."""
    if parameters < 1 * BILLION:
        return "ddp", "none"
    if parameters <= 7 * BILLION:
        return ("ddp", "none") if ddp_runs else ("zero2", "none")
    if parameters <= 30 * BILLION:
        return "zero3", "none"
    return ("zero3", "parameters") if parameters >= 70 * BILLION else None


RULES: dict[str, Callable[[int, bool], tuple[Strategy, Offload] | None]] = {
    "decision tree by size": decision_tree_by_size,
    "scenario table": scenario_table,
}


def rules_of_thumb(
    search: Search, request: EstimateRequest, winner: Candidate | None, feasible: Sequence[Candidate]
) -> tuple[RuleOfThumb, ...]:
    """The choice of each rule for the search's model. The rules have no margin: a choice runs if it fits the whole memory.

    `feasible` are the plans that fit, each at its best micro-batch: they are compared with the winner by their speed.
    """
    parameters = search.evaluator.model.parameters
    ddp_runs = _ddp_runs(search, request)
    return tuple(
        _checked(search, request, source, rule(parameters, ddp_runs), winner, feasible)
        for source, rule in RULES.items()
    )


def _ddp_runs(search: Search, request: EstimateRequest) -> bool:
    try:
        return _runs(_candidate(search, _plain(search, request, "ddp", "none"))) is True
    except UsageError:
        return False


def _checked(
    search: Search,
    request: EstimateRequest,
    source: str,
    given: tuple[Strategy, Offload] | None,
    winner: Candidate | None,
    feasible: Sequence[Candidate],
) -> RuleOfThumb:
    """A rule's choice with its estimate."""
    if given is None:
        because = "it has no row for models between 30B and 70B"
        return RuleOfThumb(source=source, strategy=None, offload=None, would_run=None, because=because)
    would_run: bool | None = False
    try:
        candidate = _candidate(search, _plain(search, request, *given))
    except UsageError as refused:
        because = refused.message
    else:
        would_run, because = _runs(candidate), _because(search, candidate, winner, feasible)
    return RuleOfThumb(source=source, strategy=given[0], offload=given[1], would_run=would_run, because=because)


def _plain(search: Search, request: EstimateRequest, strategy: Strategy, offload: Offload) -> Plan:
    """The plan of a bare strategy, as a rule of thumb names it. Raises UsageError if it is refused.

    That is the backend of its estimate, the smallest micro-batch, and no checkpointing unless the request requires it.
    """
    choice = StrategyChoice(
        strategy=strategy,
        backend=plan_of_row(request, strategy, offload, search.base.seq_len).backend,
        offload=offload,
        activations=search.activation_choices[0],
    )
    plan = search.plan(choice, search.batches.smallest)
    if (refused := row_refusal(plan) or backend_refusal(plan, search.evaluator.gpu)) is not None:
        raise refused
    return plan


def _candidate(search: Search, plan: Plan) -> Candidate | None:
    """The plan with its estimate; None if its memory is unknown."""
    try:
        return search.evaluator.candidate(plan)
    except AdvisorError:
        return None


def _runs(candidate: Candidate | None) -> bool | None:
    """Whether a plan fits the whole memory of GPU and host."""
    return None if candidate is None else candidate.estimate.fits


def _because(
    search: Search, candidate: Candidate | None, winner: Candidate | None, feasible: Sequence[Candidate]
) -> str:
    """The memory of a rule's choice, and how its speed compares with the winner's."""
    if candidate is None:
        return "its memory is unknown"
    memory = candidate.estimate.needed_bytes
    if memory is None:
        return f"its states alone take {format_gib(candidate.state_bytes)}"
    cache = ", the allocator's cache included" if candidate.runs_in_available else ""
    text = f"at micro-batch {candidate.plan.micro_batch_size} it needs {format_gib(memory)}{cache}"
    if winner is not None and candidate.allocator_conf != winner.allocator_conf:
        conf = candidate.allocator_conf
        text += f" with PYTORCH_ALLOC_CONF={conf}" if conf else " with the allocator's default settings"
    if candidate.host_fits is False:
        text += f", and {format_gib(candidate.host_peak_bytes_per_node)} of host memory per node"
    if not _runs(candidate) or winner is None:
        return text
    if winner.choice == candidate.choice:
        return f"{text}: the same strategy as recommended"
    if not candidate.fits:
        return f"{text}, which leaves less than the margin"
    best = next((c for c in feasible if c.choice == candidate.choice), None)
    own = best.tokens_per_second_per_gpu if best else None
    here = winner.tokens_per_second_per_gpu
    if best is None or not own or not here:
        return text
    at = f"at its best micro-batch, {best.plan.micro_batch_size}"
    speeds = (search.evaluator.speed_text(speed, winner.plan.seq_len) for speed in (own, here))
    return f"{text}; {at}, it trains {' per GPU, against '.join(speeds)} here"
