"""How a job computes its loss: the option's values, and the implementation that each selects under each framework."""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.errors import UsageError, assert_never
from fsdp_advisor.job.choices import Framework, Loss, TrainingTask
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest

LossCode = Literal["full", "trl", "liger", "cce", "torchtitan"]
"""The implementation that computes the loss. ``full``: the model's own, from all logits. ``trl``: TRL's, in tiles of tokens, which
``--loss chunked`` selects except under torchtitan. ``torchtitan``: its own, in chunks of each sequence.
"""


def loss_code(request: EstimateRequest) -> LossCode:
    """The implementation of the loss that the framework runs. Raises UsageError for a loss that the framework refuses.

    With `use_liger_kernel` the Trainer uses Liger's loss; TRL keeps its own. A reward model has no logits of a vocabulary. Source: trl
    1.16, sft_trainer.py. It raises ValueError for Liger's fused linear cross entropy, and has no loss on whole logits.
    """
    _check_kernels(request)
    loss, usual = request.loss, FRAMEWORKS[request.framework].default_loss
    if loss == "auto" or request.task == "reward":
        return usual_loss(request.framework, request.task, use_liger_kernel=request.use_liger_kernel)
    if usual == "trl" and loss != "chunked":
        raise UsageError(
            f"TRL 1.16 always computes the loss in its own tiles and does not accept --loss {loss}",
            hint="--framework trainer accepts it",
        )
    if usual == "torchtitan":
        if loss not in ("chunked", "full"):
            raise UsageError(
                f"torchtitan 0.3 does not accept --loss {loss}", hint="--loss chunked (its default) or full"
            )
        return "torchtitan" if loss == "chunked" else "full"
    return "trl" if loss == "chunked" else loss


def losses_without_logits(
    loss: LossCode, framework: Framework, task: TrainingTask, model_task: str | None
) -> tuple[Loss, ...]:
    """The values of `--loss` with which a step that computes `loss` would never have all logits; none if it has no others."""
    if loss != "full" or task != "sft" or model_task != "causal-lm":
        return ()
    return ("chunked",) if FRAMEWORKS[framework].default_loss == "torchtitan" else ("liger", "cce")


def usual_loss(framework: Framework, task: TrainingTask, *, use_liger_kernel: bool) -> LossCode:
    """The implementation that the framework runs if no loss is chosen."""
    usual = FRAMEWORKS[framework].default_loss
    if task == "reward":
        return "full"
    return "liger" if use_liger_kernel and usual == "full" else usual


def loss_option(code: LossCode) -> Loss:
    """The value of `--loss` that selects this implementation."""
    match code:
        case "trl" | "torchtitan":
            return "chunked"
        case "full" | "liger" | "cce":
            return code
        case _:
            return assert_never(code)


def loss_words(code: LossCode) -> str:
    """The name of a loss in answers; empty for the default losses: the model's own, TRL's and torchtitan's."""
    match code:
        case "liger":
            return "Liger's loss"
        case "cce":
            return "cut cross entropy"
        case "full" | "trl" | "torchtitan":
            return ""
        case _:
            return assert_never(code)


def _check_kernels(request: EstimateRequest) -> None:
    """Raises UsageError for a job that is not modelled with Liger's kernels."""
    if not request.use_liger_kernel:
        return
    if FRAMEWORKS[request.framework].own_models:
        raise UsageError(
            f"Liger's kernels are for models of transformers, and {request.framework} trains its own",
            hint="leave --use-liger-kernel out, or use --framework trainer",
        )
    if request.task != "sft":
        raise UsageError(
            f"Liger's kernels are not modelled with --task {request.task}", hint="leave --use-liger-kernel out"
        )
