"""The Trainer's evaluation between training steps: its batches, and the logits that it keeps.

Source: transformers 5.23, trainer.py, `evaluate`, `evaluation_loop`, `prediction_step`; trl 1.16, trainer/sft_trainer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.evaluation_fields import EvalStrategy
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.units import list_words

OPTIONS = (
    "per_device_eval_batch_size",
    "compute_metrics",
    "prediction_loss_only",
    "eval_accumulation_steps",
    "eval_samples",
)
"""The options that have an effect only if the job evaluates."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of a plan.

    `batch_size`: sequences per rank and forward. `kept_batches`: the number of batches whose logits are on the GPU together; 0 if only
    losses are kept. `accumulation_steps`: the number of batches after which kept logits move to the host; None: after the last batch.
    """

    batch_size: int
    kept_batches: int = 0
    strategy: EvalStrategy = "steps"
    accumulation_steps: int | None = None

    @property
    def text(self) -> str:
        """The evaluation in words.

        >>> Evaluation(batch_size=8, kept_batches=4).text
        'micro-batch 8, keeping the logits of 4 batches'
        """
        kept = f", keeping the logits of {self.kept_batches} batches" if self.kept_batches else ""
        return f"micro-batch {self.batch_size}{kept}"


def evaluation_of(request: EstimateRequest) -> Evaluation | None:
    """The evaluation of a request; None if it has none. Raises UsageError for options that contradict each other or are not modelled."""
    if request.eval_strategy == "no":
        if changed := request.changed_among(OPTIONS):
            raise UsageError(
                f"{dashed(changed[0])} configures evaluation, and the job does not evaluate",
                hint="add --eval-strategy steps",
            )
        return None
    facts = FRAMEWORKS[request.framework]
    if not facts.uses_trainer:
        evaluating = tuple(name for name, others in FRAMEWORKS.items() if others.uses_trainer)
        raise UsageError(
            f"the evaluation of framework {request.framework} is not modelled",
            hint=f"--framework {list_words(evaluating)} has it",
        )
    keeps = request.compute_metrics and not request.prediction_loss_only
    if keeps and facts.default_loss != "full" and request.task != "sft":
        raise UsageError(
            f"the logits that TRL's evaluation keeps are not modelled with --task {request.task}",
            hint="leave --compute-metrics out",
        )
    return Evaluation(
        batch_size=request.per_device_eval_batch_size,
        kept_batches=_kept_batches(request) if keeps else 0,
        strategy=request.eval_strategy,
        accumulation_steps=request.eval_accumulation_steps,
    )


def _kept_batches(request: EstimateRequest) -> int:
    every = request.eval_accumulation_steps
    if request.eval_samples is not None:
        batches = -(-request.eval_samples // (request.per_device_eval_batch_size * request.gpus))
        return batches if every is None else min(batches, every)
    if every is None:
        raise UsageError(
            "with --compute-metrics each GPU keeps the logits of the whole evaluation set, whose size is unknown",
            hint="give --eval-samples, or --eval-accumulation-steps, which limits the batches that are kept",
        )
    return every
