"""Limits that several targets share because they use the same framework or library.

A limit is a function that returns why a job cannot be trained, or None. Limits of a single consumer are in its own module.
"""

from __future__ import annotations

from fsdp_advisor.export.job import Job
from fsdp_advisor.job.plan import Plan, refusal


def framework_limit(job: Job, framework: str) -> str | None:
    """Why `framework` cannot train the job, whichever framework was estimated."""
    plan = job.plan
    error = refusal(
        plan.strategy,
        plan.backend,
        framework=framework,
        wrap=plan.wrap,
        activation_checkpointing=plan.activation_checkpointing,
    )
    return str(error) if error is not None else None


def bitsandbytes_limit(plan: Plan) -> str | None:
    """bitsandbytes' optimizers treat FSDP2's DTensors as plain tensors.

    Source: bitsandbytes issue 1633. axolotl refuses the combination as well.
    """
    if plan.backend == "fsdp2" and plan.optim == "adamw_bnb_8bit":
        return "bitsandbytes' 8-bit AdamW cannot step FSDP2's parameters (try another --optim, or --backend fsdp1)"
    return None
