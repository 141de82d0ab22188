"""What a script passes to `from_pretrained`, and why other files cannot."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.adapters import weights
from fsdp_advisor.export.job import Job


def model_arguments(job: Job) -> dict[str, Any]:
    """The arguments of `from_pretrained`, as far as they are not transformers' defaults.

    sdpa is not named: transformers falls back to eager if a model has no sdpa.
    """
    plan = job.plan
    return {
        "dtype": weights(job),
        **({} if plan.attention == "sdpa" else {"attn_implementation": plan.attention}),
        **(
            {}
            if plan.experts_implementation == "grouped_mm"
            else {"experts_implementation": plan.experts_implementation}
        ),
    }


def experts_limit(job: Job) -> str | None:
    """Why a consumer cannot train the job whose configuration does not choose the code for experts."""
    if job.plan.experts_implementation == "grouped_mm":
        return None
    return "its configuration does not choose the code for experts; use the target script or trainer"
