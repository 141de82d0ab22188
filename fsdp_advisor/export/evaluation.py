"""The settings of the Trainer's evaluation in exported files. Source: transformers 5.23, training_args.py."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.job import Job


def evaluation_limit(job: Job) -> str | None:
    """Why a consumer without the Trainer's evaluation cannot train the job; None if the job does not evaluate."""
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
    """Notes on what the user has to pass to the Trainer in addition to its arguments."""
    evaluation = job.plan.evaluation
    if evaluation is None:
        return []
    metrics = " and the function compute_metrics" if evaluation.kept_batches else ""
    return [f"pass the Trainer an eval_dataset{metrics}"]
