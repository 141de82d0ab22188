"""Predicted peaks equal those of PyTorch's own FSDP2, FSDP1 and DDP around whole models under fake tensors, to the byte.

Two differences are accepted. torch's foreach AdamW, Adagrad and RMSprop keep their step counts on the host, 512 bytes per parameter,
which a run on fake CPU tensors counts. FSDP1 under mixed precision also casts buffers, so Gemma does not cast its
embedding scale, 512 bytes, as the catalog's tapes do.
"""

from __future__ import annotations

import pytest
from matrix import taken
from simulated_cases import FRAMEWORKS, MORE_FRAMEWORKS, MORE_TORCH, TORCH, Case, of_case, plan_of, settings_of

torch = pytest.importorskip("torch")

from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording import TransformersSource
from fsdp_advisor.step_figures import peak_of_step  # after the check for torch
from fsdp_advisor.tapes import tape_key_of  # after the check for torch
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", taken(TORCH, MORE_TORCH, days=4), ids=str)
def test_predicted_peaks_equal_pytorch(case: Case) -> None:
    if case.optim.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    plan = plan_of(case)
    model = resolve(case.model)
    assert model.profile is not None
    profile = of_case(model.profile)
    step = peak_of_step(profile, model.tape(tape_key_of(plan, profile)), plan)
    found = simulate(TransformersSource(profile.config, name=case.model, task=profile.task), plan)
    layers = sum(len(u.parameters) for u in profile.layers()) + len(profile.root.parameters)
    host_steps = 512 * layers if case.optim in ("adamw_torch", "adagrad", "rmsprop") else 0
    spared = 512 if case.backend == "fsdp1" and "gemma" in case.model else 0
    for phase, n_bytes in found.phase_peaks.items():
        short = n_bytes - step.phase_peaks[phase]
        assert -spared <= short <= host_steps, (phase, n_bytes, step.phase_peaks[phase])


def test_cases_cover_the_settings_of_the_whole_matrix() -> None:
    part, more = [*TORCH, *FRAMEWORKS], [*MORE_TORCH, *MORE_FRAMEWORKS]
    assert settings_of(part) == settings_of([*part, *more])
