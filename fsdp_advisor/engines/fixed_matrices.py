"""Adapters that multiply by fixed matrices. PEFT makes these buffers in fp32, and FSDP2 and DeepSpeed cast parameters alone.

Each was run: the product of an input in 16 bits and a matrix in fp32 is an error. Autocast casts both, and FSDP1 casts buffers too.
Source: peft 0.21, tuners/{vera,pvera,unilora,tinylora}/layer.py, `forward`; deepspeed 0.19.8, runtime/engine.py (`buffer_dtype`).
"""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.frameworks import BACKEND_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile

_METHODS = {".vera_": "VeRA", ".pvera_": "PVeRA", ".unilora_": "UniLoRA", ".tinylora_": "TinyLoRA"}
"""A part of the names of trained parameters -> the method."""


def fixed_matrices_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the plan's engine cannot train a model with such adapters; None if it can, or if the model has none."""
    casts = plan.precision != "fp32" if plan.backend == "deepspeed" else plan.backend == "fsdp2" and plan.mixed
    if not casts or plan.task == "grpo":  # TRL's GRPO runs the model under autocast
        return None
    names = [p.name for p, _ in profile.counted_parameters() if p.role == "adapter"]
    method = next((method for part, method in _METHODS.items() if any(part in name for name in names)), None)
    if method is None:
        return None
    return UsageError(
        f"{BACKEND_NAMES[plan.backend]} casts the parameters of {method} to 16 bits and not its fixed matrices, so their products fail:"
        " expected mat1 and mat2 to have the same dtype",
        hint="--strategy ddp, --precision fp32, or LoRA: --use-peft",
    )
