"""Peaks of a job's step, predicted and simulated by PyTorch's own engines under fake tensors. Needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from matrix import ALL

from fsdp_advisor.engines.registry import model_refusal
from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.recording import source_of
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

PhasePeaks = Mapping[str, int]


def tape_for(model: Resolved, plan: Plan) -> Tape:
    """The tape of the plan's own micro-batch and length. With `CASES=all`, the tape for any, if there is one.

    GPU tapes are not needed here, and recording a tape for any batch takes about four times as long.
    """
    assert model.profile is not None
    key = tape_key_of(plan, model.profile)
    if ALL and key.at is None:
        with contextlib.suppress(NotPolynomial):
            return model.tape(key)
    return model.tape(replace(key, at=plan.tape_shape))


def predicted_and_simulated(request: EstimateRequest) -> tuple[PhasePeaks, PhasePeaks]:
    """Bytes by phase of one steady step of rank 0: predicted, and simulated with the whole model."""
    plan, model = _job(request)
    profile = model.profile
    assert profile is not None
    source = source_of(profile.config, name=request.model, task=profile.task)
    return _predicted(plan, model), simulate(source, plan).phase_peaks


def predicted_peaks(request: EstimateRequest) -> PhasePeaks:
    """Bytes by phase of one steady step of rank 0, as predicted."""
    return _predicted(*_job(request))


def _job(request: EstimateRequest) -> tuple[Plan, Resolved]:
    """The only plan of a job and its model. Raises what an estimate refuses, such as packed weights that FSDP would destroy."""
    assert request.seq_len is not None
    (plan,) = plans(request, seq_len=request.seq_len)
    model = resolve(request.model).adapted(adaptation_of(request))
    assert model.profile is not None
    if (refused := model_refusal(model.profile, plan)) is not None:
        raise refused
    return plan, model


def _predicted(plan: Plan, model: Resolved) -> PhasePeaks:
    assert model.profile is not None
    return peak_of_step(model.profile, tape_for(model, plan), plan).phase_peaks
