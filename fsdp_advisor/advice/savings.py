"""The memory that another loss, checkpointing and activation offload each save in a plan, and their cost in speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice
from fsdp_advisor.job.losses import loss_option
from fsdp_advisor.step_figures import logits_bytes_at_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The saving of one activation choice in the recommended plan, compared with the plain step at the same micro-batch.

    `saved_bytes`: the reduction of the tensors' peak on a GPU; if `is_bound`, an upper limit of it, because the step is not recorded.
    `relative_speed`: tokens per second as a multiple of the plain step's; None if unknown. `is_used`: whether the recommended plan makes
    this choice.
    """

    activations: ActivationChoice
    saved_bytes: int
    is_bound: bool = False
    relative_speed: float | None = None
    is_used: bool = False

    def as_dict(self) -> dict[str, Any]:
        speed = self.relative_speed
        return {
            "loss": loss_option(self.activations.loss_code),
            "activation_checkpointing": self.activations.activation_checkpointing,
            "activation_offload": self.activations.activation_offload,
            "saved_bytes": self.saved_bytes,
            "is_bound": self.is_bound,
            "relative_speed": None if speed is None else float(f"{speed:.4g}"),
            "is_used": self.is_used,
        }


def savings(search: Search, winner: Candidate) -> tuple[Saving, ...]:
    """The savings of the activation choices in the winner's plan, the least costly first. Empty for a bare parameter count."""
    return () if search.evaluator.model.profile is None else tuple(_savings(search, winner))


def _savings(search: Search, winner: Candidate) -> Iterator[Saving]:
    evaluator, plain = search.evaluator, search.activation_choices[0]
    known = {c.activations: c for c in search.choices if _is_same_strategy(c, winner.choice)}
    if plain not in known or search.recording_error(known[plain]) is not None:
        return
    size = winner.plan.micro_batch_size
    plain_plan = search.plan(known[plain], size)
    whole, seconds = evaluator.lower_bound(plain_plan), evaluator.seconds(plain_plan)
    losses = {activations.loss_code for activations in known}
    for activations in search.left_out:
        if activations.loss_code not in losses and activations[1:] == plain[1:]:
            saved = logits_bytes_at_peak(evaluator.model, plain_plan, evaluator.gpu)
            yield Saving(activations=activations, saved_bytes=saved, is_bound=True)
    for activations in search.activation_choices[1:]:
        choice = known.get(activations)
        if choice is None or search.recording_error(choice) is not None:
            continue
        plan = search.plan(choice, size)
        own = evaluator.seconds(plan)
        yield Saving(
            activations=activations,
            saved_bytes=whole - evaluator.lower_bound(plan),
            relative_speed=seconds / own if seconds and own else None,
            is_used=activations == winner.choice.activations,
        )


def _is_same_strategy(one: StrategyChoice, other: StrategyChoice) -> bool:
    def engine(choice: StrategyChoice) -> tuple[str, ...]:
        return choice.strategy, choice.backend, choice.offload, choice.offload_device

    return engine(one) == engine(other)
