"""The Trainer's evaluation as exported files name it. Source: transformers 5.23, training_args.py."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.job import Job


def evaluation_limit(job: Job) -> str | None:
    """Why a consumer whose evaluation is not the Trainer's own cannot do the job."""
    if job.plan.evaluation is None:
        return None
    return "its evaluation is not written; leave --eval-strategy out, or use the target trainer"


def evaluation_arguments(job: Job) -> dict[str, Any]:
    """The arguments of the Trainer for the evaluation; empty without one."""
    evaluation = job.plan.evaluation
    if evaluation is None:
        return {}
    steps = evaluation.accumulation_steps
    return {
        "eval_strategy": evaluation.strategy,
        "per_device_eval_batch_size": evaluation.batch_size,
        "prediction_loss_only": not evaluation.kept_batches,
        **({} if steps is None else {"eval_accumulation_steps": steps}),
    }


def evaluation_notes(job: Job) -> list[str]:
    """What the user has to give the Trainer besides its arguments."""
    evaluation = job.plan.evaluation
    if evaluation is None:
        return []
    metrics = " and the function compute_metrics" if evaluation.kept_batches else ""
    return [f"pass the Trainer an eval_dataset{metrics}"]
