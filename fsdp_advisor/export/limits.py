"""Limits that several targets share because they use the same framework or library.

A limit is a function that returns why a job cannot be trained, or None if it can. Limits of a single consumer are in its own module.
"""

from __future__ import annotations

from fsdp_advisor.export.job import Job
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.optimizers import limit_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.refusals import combination_refusal
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Refusal

NO_MODEL = "a bare parameter count is not a model"


def task_limit(job: Job) -> str | None:
    """Why a consumer that trains only causal language models cannot train the job."""
    if job.task is None:
        return NO_MODEL
    return None if job.task == "causal-lm" else "it trains only causal language models"


def needs_fsdp2(plan: Plan) -> str:
    """How a plan gets FSDP2, for a consumer that lacks its backend: the optimizer may be the reason why it has another."""
    limit = limit_of(plan.optim, "fsdp2", plan.framework)
    return "use --backend fsdp2" if limit is None else f"for FSDP2 use another --optim, because {limit.reason}"


def framework_limit(job: Job, framework: Framework) -> str | None:
    """Why `framework` cannot train the job, whichever framework was estimated."""
    plan = job.plan
    optimizer = optimizer_of(plan)
    made = optimizer.transformers if FRAMEWORKS[framework].uses_trainer else optimizer.script
    if isinstance(made, Refusal) and not optimizer.is_deepspeeds:
        return made.reason
    error = combination_refusal(plan.strategy, plan.backend, framework, plan)
    return error.message if error is not None else None


def optimizer_limit(plan: Plan, framework: Framework) -> str | None:
    """Why the plan's engine cannot step the optimizer under `framework`."""
    limit = limit_of(plan.optim, plan.backend, framework)
    return f"{limit.reason} ({limit.hint})" if limit is not None else None
