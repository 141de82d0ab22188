"""How a job computes its loss: the option, and whose code it stands for under each framework."""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import may_adapt
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest, Framework, Loss

LossCode = Literal["full", "trl", "liger", "cce"]
"""Whose code computes the loss; ``full``: the model's own, of whole logits."""


def loss_code(loss: Loss, framework: Framework) -> LossCode:
    """The code that a framework runs for the option. Raises UsageError for a loss that it refuses.

    Source: trl 1.16, sft_trainer.py: it raises ValueError for Liger's fused linear cross entropy, and has no loss of whole logits.
    """
    usual = FRAMEWORKS[framework].loss
    if loss == "auto":
        return usual
    if usual == "trl" and loss != "chunked":
        raise UsageError(
            f"TRL 1.16 computes the loss in tiles of its own and accepts no loss {loss}",
            hint="--framework trainer accepts it",
        )
    return "trl" if loss == "chunked" else loss


def needs_recording(request: EstimateRequest) -> bool:
    """Whether the request is about steps that the catalog has for no model, so that they must be recorded."""
    return may_adapt(request) or loss_code(request.loss, request.framework) != "full"
