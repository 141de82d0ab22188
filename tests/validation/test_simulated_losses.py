"""Predicted peaks with losses without whole logits against PyTorch's engines around the same model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase. `tests/rehearsal/test_losses.py` compares the
losses themselves with the libraries' code.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from matrix import in_turn, taken
from small_models import Case, name_of, options_of, small_models

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.errors import NotRecordable, UsageError  # after the check
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.validation.predict import predict

pytestmark = pytest.mark.slow

VOCABULARY = 70_001
CONFIGS = small_models(vocabulary=VOCABULARY, gpt2={"vocab_size": 50_257})
CONFIGS = {**CONFIGS, "one tile": {**CONFIGS["llama"], "vocab_size": 20_001}}
MODELS = ("llama", "qwen3", "mistral", "phi3", "mixtral", "olmo2", "gpt2")
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "ddp", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp1", "gpus": "4"},
)
VARIATIONS: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"gradient_accumulation_steps": "2"},
    {"precision": "bf16"},
    {"micro_batch_size": "20", "seq_len": "250"},  # more than a tile
    {"use_peft": "true"},
    {"ignored_labels": "0.4"},
    {"freeze": "lm_head", "precision": "bf16"},
)

NEEDED: dict[tuple[str, str], dict[str, str]] = {  # without a default of PEFT's, or with a head that has another name
    ("phi3", "use_peft"): {"lora_target_modules": "qkv_proj"},
    ("olmo2", "use_peft"): {"lora_target_modules": "all-linear"},
    ("mixtral", "use_peft"): {"lora_target_modules": "q_proj,v_proj"},
    ("gpt2", "freeze"): {"freeze": "transformer.wte"},
    ("qwen3", "freeze"): {"freeze": "model.embed_tokens"},
}


def _complete(case: Case) -> Case:
    return case | {k: v for option in case for k, v in NEEDED.get((case["model"], option), {}).items()}


FEW: list[Case] = [
    {"model": "llama", "loss": "chunked", **ENGINES[2], **VARIATIONS[4]},
    {"model": "one tile", "loss": "chunked", **ENGINES[0], **VARIATIONS[4]},  # of the vocabulary
    {"model": "qwen3", "loss": "liger", **ENGINES[3], **VARIATIONS[2]},
    {"model": "llama", "loss": "cce", **ENGINES[1], **VARIATIONS[6]},
    {"model": "llama", "loss": "chunked", **ENGINES[0], **VARIATIONS[5]},
    {"model": "qwen3", "loss": "chunked", **ENGINES[2], **VARIATIONS[3]},
    {"model": "llama", "loss": "chunked", **ENGINES[2], **VARIATIONS[5], "lora_modules_to_save": "lm_head"},
]
MORE: list[Case] = [
    _complete({"model": model, "loss": loss, **ENGINES[(m + i) % 4], **VARIATIONS[(3 * m + i) % len(VARIATIONS)]})
    for i, ((m, model), loss) in enumerate(product(enumerate(MODELS), ("chunked", "liger", "cce") * 5))
    if (model, loss) != ("gpt2", "liger")
]


def asked(case: Case, folder: Path) -> EstimateRequest:
    return make_request(options_of(CONFIGS, case, folder))


@pytest.mark.parametrize("case", taken(FEW, MORE, days=8), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_a_loss_in_tiles(case: Case, tmp_path: Path) -> None:
    predicted, simulated = predicted_and_simulated(asked(case, tmp_path))
    assert predicted == simulated


@in_turn(0, of=2)
def test_no_loss_in_tiles_holds_the_logits(tmp_path: Path) -> None:
    case = {
        "model": "llama",
        **ENGINES[0],
        "micro_batch_size": "20",
        "seq_len": "500",
        "activation_checkpointing": "full",
    }
    logits = 20 * 500 * VOCABULARY * 2
    assert predict(asked({**case, "loss": "cce"}, tmp_path)).predicted["phase_peaks"]["backward"] < logits


@pytest.mark.parametrize(("model", "loss"), [("bert", "cce"), ("gpt2", "liger")])
def test_a_model_that_the_loss_is_not_made_for_is_refused(model: str, loss: str, tmp_path: Path) -> None:
    with pytest.raises(NotRecordable, match="loss"):
        predict(asked({"model": model, "loss": loss, **ENGINES[0]}, tmp_path))


def test_an_adapter_of_the_head_that_the_loss_would_not_train_is_refused(tmp_path: Path) -> None:
    adapted = {"use_peft": "true", "lora_target_modules": "q_proj,lm_head"}
    with pytest.raises(NotRecordable, match="would not be trained"):
        predict(asked({"model": "llama", "loss": "cce", **ENGINES[0], **adapted}, tmp_path))


@pytest.mark.parametrize(("framework", "loss"), [("trl", "auto"), ("trainer", "liger")])
def test_a_trained_head_that_is_an_fsdp1_unit_is_refused(framework: str, loss: str, tmp_path: Path) -> None:
    """The loss reads the head's weight without calling the head, and PEFT's policy makes the trained copy a unit."""
    job = {"use_peft": "true", "lora_modules_to_save": "lm_head", "framework": framework, "loss": loss}
    request = asked({"model": "llama", **ENGINES[3], **job}, tmp_path)
    with pytest.raises(UsageError, match="unit by itself"):
        estimate_resolved(request, resolve(request.model))
