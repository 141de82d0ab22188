"""Predicted peaks of wrap policies, forward prefetch and resharding equal those of PyTorch's own policies and engines under fake tensors, to the byte."""

from __future__ import annotations

import pytest
from simulated_cases import Case, plan_of

torch = pytest.importorskip("torch")

from fsdp_advisor.estimator import peak_of_step  # after the check for torch
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording import TransformersSource
from fsdp_advisor.tapes import tape_key_of
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

PYTHIA, GPT2, T5 = "EleutherAI/pythia-70m", "openai-community/gpt2", "google-t5/t5-small"
OF_A_MODULE, OF_A_LAYER, OF_THE_BASE_MODEL = "size:800K", "size:2M", "size:15M"

CASES = [
    Case(PYTHIA, "fsdp2", "zero3", 4, 2, 256, wrap=OF_A_MODULE),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, "fp32", wrap=OF_A_MODULE, backward_prefetch="post"),
    Case(PYTHIA, "fsdp1", "zero2", 4, 2, 256, wrap=OF_A_LAYER),
    Case(PYTHIA, "fsdp1", "zero3", 4, 2, 256, wrap=OF_THE_BASE_MODEL),
    Case(PYTHIA, "fsdp2", "hsdp", 8, 2, 256, wrap="every:4", nnodes=2, activation_checkpointing="full"),
    Case(GPT2, "fsdp1", "zero3", 3, 2, 256, wrap="none", gradient_accumulation_steps=2),
    Case(GPT2, "fsdp2", "zero3", 3, 2, 256, wrap="every:5", gradient_accumulation_steps=3),
    Case(T5, "fsdp2", "zero3", 3, 2, 256, wrap="every:4"),
    Case(PYTHIA, "fsdp2", "zero3", 8, 2, 256, forward_prefetch=True),
    Case(PYTHIA, "fsdp1", "zero2", 8, 2, 256, "fp32", forward_prefetch=True),
    Case(PYTHIA, "fsdp1", "hsdp", 16, 2, 256, nnodes=2, reshard_after_forward="false"),
    Case(PYTHIA, "fsdp2", "hsdp", 16, 2, 256, nnodes=2, reshard_after_forward="4", activation_checkpointing="full"),
    Case(PYTHIA, "fsdp2", "zero3", 8, 2, 256, "fp32", reshard_after_forward="2"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_peaks_equal_pytorch(case: Case) -> None:
    plan = plan_of(case)
    model = resolve(case.model)
    profile = model.profile
    assert profile is not None
    step = peak_of_step(profile, model.tape(tape_key_of(plan, profile)), plan)
    found = simulate(TransformersSource(profile.config, name=case.model, task=profile.task), plan)
    assert step.phase_peaks == found.phase_peaks
