"""Predicted peaks of vision-language models with images against PyTorch's engines around the same model, equal to the byte.

transformers' own forward runs on batches as its processors make them: pixels, grids, and real placeholders.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from vision_models import MODELS, config_of, options_of

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.job.parsing import make_request  # after the check

pytestmark = in_turn(0, of=3)

ENGINES: tuple[dict[str, Any], ...] = (
    {"strategy": "zero3", "backend": "fsdp2", "gpus": 2, "micro_batch_size": 2},
    {"strategy": "ddp", "gpus": 2, "precision": "bf16"},
)
Case = tuple[str, dict[str, Any]]
FEW: list[Case] = [
    ("qwen2_5_vl", ENGINES[0]),
    ("smolvlm", {**ENGINES[1], "activation_checkpointing": "full"}),
]
MORE: list[Case] = [
    ("internvl", {**ENGINES[0], "freeze": "vision_tower"}),
    *product(MODELS, ENGINES),  # no gradient reaches some layers of LLaVA's, which read the outputs of an inner layer
]


@pytest.mark.parametrize(("model", "options"), taken(FEW, MORE, days=2), ids=str)
def test_predictions_with_images_equal_simulated_steps(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(model)))
    request = make_request({"model": str(path), "seq_len": 600, **options_of(model), **options})
    predicted, simulated = predicted_and_simulated(request)
    assert predicted == simulated


@pytest.mark.parametrize("model", taken(["smolvlm"], ["llava"]))
def test_ddp_clones_the_logits_of_a_step_on_text_to_search_for_unused_parameters(model: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(model)))
    request = make_request({"model": str(path), "seq_len": 64, **ENGINES[1]})
    predicted, simulated = predicted_and_simulated(request)
    assert predicted == simulated
