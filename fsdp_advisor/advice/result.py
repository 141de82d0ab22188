"""The recommendation, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_advisor.advice.cost import Training
from fsdp_advisor.advice.families import Family
from fsdp_advisor.advice.finding import Finding
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.nodes import Tree
from fsdp_advisor.advice.options import options_of
from fsdp_advisor.advice.rules import RuleOfThumb
from fsdp_advisor.advice.search import TIE
from fsdp_advisor.advice.tree import FRAGMENTATION, numbers
from fsdp_advisor.job.request import RecommendRequest
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would fit where nothing does: the options to give in place of those given."""

    options: Mapping[str, int | str]
    because: str

    def as_dict(self) -> dict[str, Any]:
        return {"options": dict(self.options), "because": self.because}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to launch and why. `winner` None: nothing fits, and `remedies` say what would.

    `rivals` are the best of every other family that fits by the cheap figures, the fastest first; `refused` those that do
    not, at their smallest micro-batch, or not with fragmentation; `left_out` those that could not be looked at. `estimate`
    is the winner's whole row.
    """

    request: RecommendRequest
    winner: Candidate | None
    estimate: StrategyEstimate | None
    rivals: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    tree: Tree
    rules: tuple[RuleOfThumb, ...]
    gpu_memory_bytes: int
    available_bytes: int
    configurations: int
    finding: Finding | None = None
    training: Training | None = None
    remedies: tuple[Remedy, ...] = ()
    left_out: Mapping[Family, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What may keep the plan from running; notes too."""

    @property
    def fits(self) -> bool | None:
        return False if self.winner is None else self.winner.fits

    @property
    def because(self) -> str:
        if self.winner is None:
            return "nothing fits: " + "; ".join(r.because for r in self.remedies) if self.remedies else "nothing fits"
        if self.finding is not None:
            return self.finding.because
        last = next(n for n in reversed(self.tree.path) if n.id not in FRAGMENTATION)
        return f"{last.question} {last.because}"

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """Memory against speed around what was looked for."""
        return self.finding.frontier if self.finding else ()

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command line, for `estimate` and `export`."""
        return options_of(self.winner, self.request) if self.winner else ()

    def why_not(self, other: Candidate) -> str:
        """Why another candidate is not the one."""
        if other.fits is False:
            return f"{numbers(other)}, at micro-batch {other.plan.micro_batch_size}"
        if self.winner is None and other.fits:
            return "it fits before fragmentation, and was not walked through the allocator"
        if other.fits is None:
            return "its states fit too, but it is less simple"
        if self.winner is None:
            return "it does not hold what was looked for"
        if other.host_unusual and not self.winner.host_unusual:
            return f"its host takes {format_gib(other.host_bytes_per_node)}"
        own, best = other.tokens_per_second_per_gpu, self.winner.tokens_per_second_per_gpu
        if own is None or best is None:
            return "it fits, but is less simple" if best is None else "it fits, but its time is not known"
        if abs(own / best - 1) <= TIE and self.winner.family.simplicity < other.family.simplicity:
            return "it is as fast, but less simple"
        if own > best and self.finding is None:
            return f"it would be {own / best - 1:.0%} faster, but was not walked through the allocator"
        if own > best:
            return f"it is {own / best - 1:.0%} faster, but not what was looked for"
        return f"it fits, but is {1 - own / best:.0%} slower"

    def as_dict(self) -> dict[str, Any]:
        """The contract's `recommendation`, with more."""
        chosen: dict[str, Any] = self.winner.as_dict() if self.winner else dict.fromkeys(_KEYS)
        if self.winner is None:
            chosen |= {"fits": False, "available_bytes": self.available_bytes}
        return {
            **chosen,
            "label": self.winner.label if self.winner else None,
            "because": self.because,
            "warnings": list(self.warnings),
            "margin": self.request.margin,
            "configurations": self.configurations,
            "path": [
                {k: v for k, v in node.as_dict().items() if k not in ("parent", "on", "taken", "outcome")}
                for node in self.tree.path
            ],
            "tree": self.tree.as_dict(),
            "rejected": [
                *({**c.as_dict(), "because": self.why_not(c)} for c in (*self.rivals, *self.refused)),
                *({**_named(family), "because": reason} for family, reason in self.left_out.items()),
            ],
            "rules_of_thumb": [rule.as_dict() for rule in self.rules],
            "find": self.finding.as_dict() if self.finding else None,
            "training": self.training.as_dict() if self.training else None,
            "what_would_fit": [remedy.as_dict() for remedy in self.remedies],
            "options": list(self.options),
            "estimate": self.estimate.as_dict() if self.estimate else None,
        }


_KEYS = (
    "strategy", "backend", "offload", "offload_device", "activation_checkpointing", "micro_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "seq_len", "gpus", "nnodes", "gpu", "fits", "needed_bytes",
    "available_bytes", "peak_reserved_bytes", "peak_device_bytes", "environment", "host_bytes_per_node", "step_seconds", "tokens_per_second_per_gpu",
)  # fmt: skip


def _named(family: Family) -> dict[str, Any]:
    named: dict[str, Any] = dict.fromkeys(_KEYS)
    return named | {
        "strategy": family.strategy,
        "backend": family.backend,
        "offload": family.offload,
        "activation_checkpointing": family.activation_checkpointing,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The estimate's report with a recommendation beside it."""

    report: Report
    recommendation: Recommendation

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The estimate's JSON with `recommendation` filled."""
        document = self.report.as_dict(timeline=timeline)
        document["request"] |= {
            name: value
            for name, value in self.recommendation.request.as_dict().items()
            if name not in document["request"]
        }
        return document | {"recommendation": self.recommendation.as_dict(), "notes": [*document["notes"], *self.recommendation.notes]}  # fmt: skip
