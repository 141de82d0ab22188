"""Training tasks: the trainers of TRL and LLaMA-Factory, their batches, and the reference models whose log-probabilities they compare.

Source: trl 1.16, trainer/sft_trainer.py, dpo_trainer.py, kto_trainer.py, reward_trainer.py, grpo_trainer.py; LLaMA-Factory 0.9.5,
train/{dpo,kto,rm}/trainer.py.
"""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES, FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest

Reference = Literal["none", "copy", "adapters-off"]
"""The reference model of a step. ``none``: there is none, or its log-probabilities are part of the batch; ``copy``: a frozen copy of
the model; ``adapters-off``: the trained model without its adapters.
"""


def sequences_per_example(task: TrainingTask) -> int:
    """The number of sequences in one example of a micro-batch: 2 for a pair (chosen and rejected), else 1."""
    return 2 if task in ("dpo", "reward") else 1


def reference_of(request: EstimateRequest) -> Reference:
    """The reference model that the loss compares the trained model with (`Reference`)."""
    without = request.task == "grpo" and request.beta == 0
    if request.task in ("sft", "reward") or request.precompute_ref_log_probs or without:
        return "none"
    return "adapters-off" if request.use_peft or request.peft_config is not None else "copy"


def check_task(request: EstimateRequest) -> None:
    """Raises UsageError for a task that the framework does not have, and for options of other tasks."""
    framework = FRAMEWORKS[request.framework]
    if request.task not in framework.tasks:
        raise UsageError(f"framework {request.framework} has no task {request.task}", hint="--framework trl has it")
    if request.precompute_ref_log_probs and not framework.precomputes_reference:
        raise UsageError(
            f"{FRAMEWORK_NAMES[request.framework]} computes the reference's log-probabilities in each step",
            hint="leave --precompute-ref-log-probs out",
        )
    if request.task == "reward" and (request.loss != "auto" or request.ignored_labels):
        raise UsageError(
            "a reward model has one score per sequence, and no labels", hint="leave --loss and --ignored-labels out"
        )
    if request.task != "sft" and request.loss not in ("auto", framework.task_loss):
        raise UsageError(
            f"--task {request.task} has its own loss and does not accept --loss {request.loss}", hint="leave --loss out"
        )
    if request.router_aux_loss_coef is not None and (not framework.adds_router_loss or request.task == "reward"):
        raise UsageError(
            "only TRL's trainers of language models add the routers' loss",
            hint="--framework trl with another task than reward, or leave --router-aux-loss-coef out",
        )
    if request.task == "grpo" and request.ignored_labels:
        raise UsageError(
            "GRPO scores only the tokens of completions", hint="give --max-completion-length, not --ignored-labels"
        )
    if request.precompute_ref_log_probs and request.task == "grpo":
        raise UsageError(
            "GRPO's reference scores new completions in every step", hint="leave --precompute-ref-log-probs out"
        )
    if request.precompute_ref_log_probs and request.task in ("sft", "reward"):
        raise UsageError(f"--task {request.task} has no reference model", hint="leave --precompute-ref-log-probs out")
