"""Predicted peaks with linear layers in fp8 against PyTorch's engines around the same model, which torchao converted.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase.
`tests/rehearsal/test_fp8_steps.py` compares allocated memory on a simulated GPU.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from matrix import in_turn, taken
from small_models import Case, name_of, options_of, small_models

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.job.parsing import make_request  # after the check
from fsdp_advisor.job.request import EstimateRequest

pytestmark = [in_turn(2, of=3), pytest.mark.usefixtures("torchao")]

CONFIGS = small_models(vocabulary=1024, layers=3)
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "ddp", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
)
FEW: list[Case] = [
    {"model": "llama", **ENGINES[2], "fp8": "tensorwise"},
    {"model": "qwen3", **ENGINES[1], "fp8": "rowwise", "activation_checkpointing": "full"},
    {"model": "llama", **ENGINES[2], "fp8": "mxfp8", "seq_len": "144"},
]
MORE: list[Case] = [
    {"model": model, **engine, "fp8": fp8, **more}
    for model, engine, fp8, more in product(
        ("llama", "qwen3", "phi3", "gpt2", "mixtral"),
        ENGINES,
        ("tensorwise", "rowwise"),
        ({}, {"activation_checkpointing": "full"}, {"precision": "bf16"}, {"gradient_accumulation_steps": "2"}),
    )
] + [
    {
        "model": model,
        **engine,
        "fp8": "mxfp8",
        "precision": "bf16" if engine["strategy"] == "ddp" else "bf16-mixed",
        **more,
    }
    for model, engine, more in product(
        ("llama", "qwen3", "phi3", "mixtral"),
        ENGINES,
        (
            {},
            {"activation_checkpointing": "full"},
            {"gradient_accumulation_steps": "2", "micro_batch_size": "1", "seq_len": "96"},
        ),
    )
]


@pytest.mark.parametrize("case", taken(FEW, MORE, days=2), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_layers_in_fp8(case: Case, tmp_path: Path) -> None:
    request = make_request(options_of(CONFIGS, case, tmp_path), EstimateRequest)
    predicted, simulated = predicted_and_simulated(request)
    assert predicted == simulated


OF_TORCHTITAN: list[Case] = [
    {"model": model, "framework": "torchtitan", "strategy": "zero3", "gpus": "4", "fp8": fp8, **more}
    for model, fp8, more in product(
        ("llama", "qwen3"),
        ("mxfp8", "rowwise"),
        (
            {"activation_checkpointing": "none"},
            {},
            {"activation_checkpointing": "full"},
            {"loss": "full"},
            {"precision": "bf16"},
        ),
    )
]


@pytest.mark.parametrize("case", taken(OF_TORCHTITAN[:1], OF_TORCHTITAN[1:], days=2), ids=name_of)
def test_predicted_peaks_equal_torchtitans_step_with_layers_in_fp8(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    predicted, simulated = predicted_and_simulated(make_request(options_of(CONFIGS, case, tmp_path), EstimateRequest))
    assert predicted == simulated
