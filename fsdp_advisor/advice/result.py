"""The types of a recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.cost import Training
from fsdp_advisor.advice.decision_tree import Tree
from fsdp_advisor.advice.ranking import RunnerUp, faster, next_simpler
from fsdp_advisor.advice.rules_of_thumb import RuleOfThumb
from fsdp_advisor.advice.savings import Saving
from fsdp_advisor.advice.search import Rejection
from fsdp_advisor.advice.search_space import StrategyChoice
from fsdp_advisor.advice.sweeps import SweepResult
from fsdp_advisor.job.command_line import options_of
from fsdp_advisor.job.fields import as_words
from fsdp_advisor.job.losses import loss_option
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.json_fields import JsonFields
from fsdp_advisor.report import Printable, Report, Rows
from fsdp_advisor.strategy_estimate import StrategyEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(JsonFields):
    """A change with which a plan fits: `options` replace those of the request."""

    options: Mapping[str, int | float | str]
    because: str

    @property
    def command(self) -> str:
        """The options as words of a command line."""
        return " ".join(word for name, value in self.options.items() for word in as_words(name, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The plan to launch, and why. `winner` is None if nothing fits; `remedies` are then changes with which a plan fits.

    `runners_up` are other plans that fit, the fastest first, one per strategy choice; `rejected` are the choices that do not
    fit, or were not estimated because they are slower. `warnings` say what may keep the plan from running; they are also in
    `notes`.
    """

    request: RecommendRequest
    winner: Candidate | None
    runners_up: tuple[RunnerUp, ...]
    rejected: tuple[Rejection, ...]
    tree: Tree
    rules: tuple[RuleOfThumb, ...]
    gpu_memory_bytes: int
    available_bytes: int
    configurations: int
    sweep: SweepResult | None = None
    training: Training | None = None
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    methods: tuple[Method, ...] = ()
    """The methods that were compared; empty if the method was fixed."""
    why_method: str | None = None
    """Why the plan's method was chosen among them; None if none fits."""
    savings: tuple[Saving, ...] = ()
    """The memory that each activation choice saves in the winner's plan."""

    @property
    def estimate(self) -> StrategyEstimate | None:
        """The winner's estimate, as `estimate` gives it for the same plan."""
        return self.winner.estimate if self.winner else None

    @property
    def fits(self) -> bool | None:
        return False if self.winner is None else self.winner.fits

    @property
    def because(self) -> str:
        """Why the winner was chosen, or why nothing fits."""
        if self.winner is None:
            return "; ".join(["nothing fits", *(r.because for r in self.remedies)]).replace("; ", ": ", 1)
        if self.sweep is not None:
            return self.sweep.because
        last = self.tree.path[-1]
        return f"{last.question} {last.because}"

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """The sweep's Pareto front of memory and speed; empty without a sweep."""
        return self.sweep.frontier if self.sweep else ()

    @property
    def options(self) -> tuple[str, ...]:
        """The winner as command-line options for `estimate` and `export`."""
        w = self.winner
        return options_of(w.plan, self.request, gpu=w.gpu, allocator_conf=w.allocator_conf) if w else ()

    @property
    def faster(self) -> RunnerUp | None:
        """The fastest plan, if it is faster than the winner and was not chosen."""
        return faster(self.winner, self.runners_up) if self.winner else None

    @property
    def why_not_simpler(self) -> str | None:
        """Why the next simpler strategy was not chosen, in one sentence; None if there is none, or after a sweep."""
        if self.winner is None or self.sweep is not None:
            return None
        reasons = {r.candidate.choice: r.why_not for r in self.runners_up} | {r.choice: r.reason for r in self.rejected}
        simpler = next_simpler(self.winner.choice, reasons, [r.candidate.choice for r in self.runners_up])
        return None if simpler is None else f"{simpler.label} was not chosen: {reasons[simpler]}"

    def as_dict(self) -> dict[str, Any]:
        """The object `recommendation` of the JSON answer."""
        chosen: dict[str, Any] = self.winner.as_dict() if self.winner else dict.fromkeys(_KEYS)
        if self.winner is None:
            chosen |= {"fits": False, "available_bytes": self.available_bytes}
        return {
            **chosen,
            "label": self.winner.label if self.winner else None,
            "because": self.because,
            "why_not_simpler": self.why_not_simpler,
            "warnings": list(self.warnings),
            "margin": self.request.margin,
            "configurations": self.configurations,
            "path": [
                {k: v for k, v in node.as_dict().items() if k not in ("parent", "on", "taken", "outcome")}
                for node in self.tree.path
            ],
            "tree": self.tree.as_dict(),
            "rejected": [
                *({**r.candidate.as_dict(), "because": r.why_not} for r in self.runners_up),
                *(_rejected(rejection) for rejection in self.rejected),
            ],
            "rules_of_thumb": [rule.as_dict() for rule in self.rules],
            "find": self.sweep.as_dict() if self.sweep else None,
            "training": self.training.as_dict() if self.training else None,
            "what_would_fit": [remedy.as_dict() for remedy in self.remedies],
            "savings": [saving.as_dict() for saving in self.savings],
            "why_method": self.why_method,
            "methods": [method.as_dict() for method in self.methods],
            "options": list(self.options),
            "estimate": self.estimate.as_dict() if self.estimate else None,
        }


_KEYS = (
    "strategy", "backend", "offload", "offload_device", "loss", "activation_checkpointing", "activation_offload", "micro_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "seq_len", "gpus", "nnodes", "gpu", "fits", "needed_bytes",
    "available_bytes", "runs_in_available", "peak_reserved_bytes", "peak_device_bytes", "environment", "host_bytes_per_node",
    "step_seconds", "tokens_per_second_per_gpu",
    "samples_per_second_per_gpu",
)  # fmt: skip


def _rejected(rejection: Rejection) -> dict[str, Any]:
    """A rejected choice as JSON, with the keys of a candidate. Values that were not estimated are None."""
    choice = rejection.choice
    row = dict.fromkeys(_KEYS) if rejection.candidate is None else rejection.candidate.as_dict()
    return row | {**_named(choice), "micro_batch_size": rejection.micro_batch_size, "because": rejection.reason}


def _named(choice: StrategyChoice) -> dict[str, Any]:
    return {
        "strategy": choice.strategy,
        "backend": choice.backend,
        "offload": choice.offload,
        "loss": loss_option(choice.activations.loss_code),
        "activation_checkpointing": choice.activation_checkpointing,
        "activation_offload": choice.activations.activation_offload,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of training and the advice for it. `advice` is None if there is none; `reason` then says why."""

    name: str
    advice: Advice | None
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """The best plan of the method as JSON: trained parameters, memory and cost."""
        found = self.advice.recommendation if self.advice else None
        winner = found.winner.as_dict() if found and found.winner else dict.fromkeys(_KEYS)
        return {
            "method": self.name,
            "fits": bool(found and found.fits),
            "because": self.reason or (found.because if found else None),
            "trainable_parameters": self.advice.report.trainable_parameters if self.advice else None,
            **{name: winner[name] for name in _METHOD_KEYS},
            "training": found.training.as_dict() if found and found.training else None,
            "options": list(found.options) if found else [],
        }


_METHOD_KEYS = (
    "strategy", "backend", "offload", "loss", "activation_checkpointing", "activation_offload", "micro_batch_size", "needed_bytes",
    "available_bytes", "step_seconds", "tokens_per_second_per_gpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Printable):
    """A report of all strategies with a recommendation."""

    report: Report
    recommendation: Recommendation

    @property
    def schema_version(self) -> int:
        return self.report.schema_version

    @property
    def model(self) -> dict[str, Any]:
        """The model as the JSON document describes it."""
        return self.report.model

    @property
    def request(self) -> RecommendRequest:
        return self.recommendation.request

    @property
    def gpu(self) -> dict[str, Any]:
        """The GPU as the JSON document describes it."""
        return self.report.gpu

    @property
    def estimates(self) -> Rows:
        """A row for each strategy, as `estimate` returns them."""
        return self.report.estimates

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the report and those of the search."""
        return (*self.report.notes, *self.recommendation.notes)

    @property
    def config_files(self) -> list[dict[str, Any]]:
        """What was read of each configuration file, and what was not."""
        return self.report.config_files

    def as_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The report's JSON with `recommendation` filled."""
        document = self.report.as_dict(timeline=timeline)
        document["request"] |= {
            name: value
            for name, value in self.recommendation.request.as_dict().items()
            if name not in document["request"] or name == "global_batch_size"
        }
        return document | {"recommendation": self.recommendation.as_dict(), "notes": list(self.notes)}
