"""Peaks of a job's step as predicted and as PyTorch's own engines have them under fake tensors. Needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from matrix import ALL

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.recording import source_of
from fsdp_advisor.rows import peak_of_step
from fsdp_advisor.tapes import tape_key_of
from fsdp_advisor.validation.simulate import simulate

PhasePeaks = Mapping[str, int]


def tape_for(model: Resolved, plan: Plan) -> Tape:
    """The tape of the plan's own micro-batch and length. With `CASES=all`, the tape for any, if there is one.

    A tape for GPUs is not needed here, and a tape for any takes about four times as long.
    """
    assert model.profile is not None
    key = tape_key_of(plan, model.profile)
    if ALL and key.at is None:
        with contextlib.suppress(NotPolynomial):
            return model.tape(key)
    return model.tape(replace(key, at=plan.tape_shape))


def predicted_and_simulated(request: EstimateRequest) -> tuple[PhasePeaks, PhasePeaks]:
    """Bytes by phase of one steady step of rank 0: as predicted, and around the whole model."""
    assert request.seq_len is not None
    (plan,) = plans(request, seq_len=request.seq_len)
    model = resolve(request.model).adapted(adaptation_of(request))
    profile = model.profile
    assert profile is not None
    step = peak_of_step(profile, tape_for(model, plan), plan)
    return step.phase_peaks, simulate(
        source_of(profile.config, name=request.model, task=profile.task), plan
    ).phase_peaks
