"""The choices that a search tries: those whose steps the catalog contains, or all with `--thorough`.

The catalog has the steps of a framework's own loss without checkpointing and with checkpointing of all layers. Other losses, selective
checkpointing and activation offload would have to be recorded first, so that a search would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice, search_space
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.liger import LIGER_LOSSES
from fsdp_advisor.model.resolved import Resolved


@dataclass(frozen=True, kw_only=True)
class OpenChoices:
    """The choices of a search, and the activation choices that it leaves out because the catalog lacks their steps."""

    choices: tuple[StrategyChoice, ...]
    left_out: tuple[ActivationChoice, ...] = ()


def open_choices(request: RecommendRequest, model: Resolved, base: Plan) -> OpenChoices:
    """The choices on the ranks of `base`. A bare parameter count has no activations to choose for."""
    has_liger = model.profile is not None and model.profile.config.get("model_type") in LIGER_LOSSES
    every = tuple(
        choice
        for choice in search_space(request, gpus=base.world_size, nnodes=base.nnodes)
        if has_liger or choice.activations.loss_code in (base.loss_code, "full")
    )
    if request.thorough and model.profile is not None:
        return OpenChoices(choices=every)
    usual = tuple(choice for choice in every if _is_usual(request, base, choice.activations))
    left_out = {choice.activations for choice in every} - {choice.activations for choice in usual}
    if model.profile is None:
        left_out = set()
    return OpenChoices(choices=usual, left_out=tuple(sorted(left_out, key=lambda activations: activations.rank)))


def _is_usual(request: RecommendRequest, base: Plan, activations: ActivationChoice) -> bool:
    """Whether an activation choice is the request's own, or one whose steps the catalog contains."""
    asked, own = request.activation_checkpointing, FRAMEWORKS[request.framework].checkpointing
    policies = {"none", "full", own} if asked == "auto" else {asked}
    return (
        activations.loss_code == base.loss_code
        and activations.activation_checkpointing in policies
        and activations.activation_offload == base.activation_offload
    )
