"""The rules of thumb that guides to sharded training give by parameter count, and whether they would have run.

Both are common in introductions to FSDP and ZeRO: a decision tree by size, and a table of scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.advice.families import Family
from fsdp_advisor.advice.judge import Candidate, Judge
from fsdp_advisor.job.plan import label
from fsdp_advisor.job.request import Offload, Strategy
from fsdp_advisor.units import format_gib, format_speed

Ask = Callable[[Strategy, Offload], Candidate | None]
"""The candidate of a strategy with an offload at the wanted micro-batch, plain; None where it cannot be looked at."""

BILLION = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """What a rule says for this model, as (strategy, offload), and what becomes of it. `would_run` None: not known."""

    source: str
    strategy: Strategy | None
    offload: Offload | None
    would_run: bool | None
    because: str

    @property
    def says(self) -> str | None:
        return None if self.strategy is None else label(self.strategy, self.offload or "none")

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "says": self.says,
            "strategy": self.strategy,
            "offload": self.offload,
            "would_run": self.would_run,
            "because": self.because,
        }


def decision_tree_by_size(parameters: int, ddp_runs: bool) -> tuple[Strategy, Offload] | None:
    """Up to 3B DDP, up to 13B ZeRO-2, up to 70B ZeRO-3, beyond it ZeRO-3 with offload."""
    if parameters <= 3 * BILLION:
        return "ddp", "none"
    if parameters <= 13 * BILLION:
        return "zero2", "none"
    return ("zero3", "none") if parameters <= 70 * BILLION else ("zero3", "parameters")


def scenario_table(parameters: int, ddp_runs: bool) -> tuple[Strategy, Offload] | None:
    """Below 1B DDP; 1 to 7B DDP if it fits, else ZeRO-2; 7 to 30B ZeRO-3; from 70B on offload. Between them it says nothing."""
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
    judge: Judge, ask: Ask, winner: Candidate | None, best: Mapping[Family, Candidate]
) -> tuple[RuleOfThumb, ...]:
    """Each rule's word for this model. A rule knows no margin: it runs where it fits the whole memory.

    `best` are the fastest of each family that leave the margin: speeds are compared at each one's own batch.
    """
    memory = judge.gpu.memory_bytes
    ddp = ask("ddp", "none")
    ddp_runs = ddp is not None and _runs(ddp, memory) is True
    found = []
    for source, rule in RULES.items():
        says = rule(judge.model.parameters, ddp_runs)
        if says is None:
            found.append(
                RuleOfThumb(
                    source=source,
                    strategy=None,
                    offload=None,
                    would_run=None,
                    because="it has no row for models between 30B and 70B",
                )
            )
            continue
        candidate = ask(*says)
        found.append(
            RuleOfThumb(
                source=source,
                strategy=says[0],
                offload=says[1],
                would_run=None if candidate is None else _runs(candidate, memory),
                because="its memory is not known" if candidate is None else _because(candidate, memory, winner, best),
            )
        )
    return tuple(found)


def _runs(candidate: Candidate, memory: int) -> bool | None:
    if candidate.host_fits is False:
        return False
    if candidate.needed_bytes is None:
        return False if candidate.state_bytes > memory else None
    return candidate.needed_bytes <= memory


def _because(candidate: Candidate, memory: int, winner: Candidate | None, best: Mapping[Family, Candidate]) -> str:
    if candidate.needed_bytes is None:
        return f"its states alone take {format_gib(candidate.state_bytes)} of {format_gib(memory)}"
    said = f"at micro-batch {candidate.plan.micro_batch_size} it needs {format_gib(candidate.needed_bytes)} of {format_gib(memory)}"
    if candidate.host_fits is False:
        said += f", and {format_gib(candidate.host_bytes_per_node)} of host memory per node"
    if not _runs(candidate, memory) or winner is None:
        return said
    if winner.family == candidate.family:
        return f"{said}: the same as here"
    if not candidate.fits:
        return f"{said}, which leaves less than the margin"
    like = best.get(candidate.family)
    if like is None:
        return said
    own, here = like.tokens_per_second_per_gpu, winner.tokens_per_second_per_gpu
    if own and here:
        at = f"micro-batch {like.plan.micro_batch_size}"
        return f"{said}; at its best, {at}, it trains {format_speed(own)} per GPU, against {format_speed(here)} here"
    return said
