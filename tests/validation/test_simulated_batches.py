"""Predicted peaks with padded batches and with batches in one row against PyTorch's engines around the same model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase.
`tests/rehearsal/test_batch_rehearsals.py` compares the batches themselves with the libraries' data collators.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from matrix import of_today, taken
from small_models import Case, name_of, options_of, small_models
from vision_models import MODELS as MODELS_WITH_IMAGES

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.errors import NotRecordable  # after the check
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation.predict import predict

pytestmark = pytest.mark.slow

CONFIGS = small_models(vocabulary=5_003, mistral={"sliding_window": 64})
MODELS = ("llama", "qwen3", "mistral", "gemma3", "mixtral", "olmo2", "gpt2")
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "ddp", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp1", "gpus": "4"},
    {"strategy": "zero2", "backend": "fsdp2", "gpus": "4"},
)
BATCHES: tuple[dict[str, str], ...] = ({"packing": "bfd"}, {"padding_free": "true"}, {"padding_fraction": "0.3"})
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
VARIATIONS: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"precision": "bf16"},
    {"micro_batch_size": "1", "seq_len": "250"},
    {"use_peft": "true", "lora_target_modules": "all-linear"},
    {"loss": "chunked", "ignored_labels": "0.4"},
    {"gradient_accumulation_steps": "2"},
)

FEW: list[Case] = [
    {"model": "llama", **ENGINES[0], **BATCHES[0], "attention": "flash_attention_2"},
    {"model": "llama", **ENGINES[2], **BATCHES[1], "attention": "sdpa"},
    {"model": "qwen3", **ENGINES[3], **BATCHES[2], "attention": "sdpa"},
    {"model": "llama", **ENGINES[2], **BATCHES[2], "attention": "flash_attention_2"},
]
READING_IMAGES = [
    *product(("gemma3", "mistral3", "qwen2_5_vl", "smolvlm", "llava"), ("sdpa", "flash_attention_2")),
    ("qwen3_5", "sdpa"),  # with flash_attention_2 the prediction has a GPU's kernels for linear attention too
]
"""Types of models that read images, here trained on text alone, and their attention."""
MORE: list[Case] = [
    {"model": model, **ENGINES[(m + 2 * b + a) % 5], **VARIATIONS[(3 * m + b + 2 * a) % len(VARIATIONS)], **batch, "attention": attention}
    for (m, model), (b, batch), (a, attention) in product(enumerate(MODELS), enumerate(BATCHES), enumerate(ATTENTIONS))
]  # fmt: skip


def asked(case: Case, folder: Path) -> EstimateRequest:
    return make_request(options_of(CONFIGS, {"micro_batch_size": "3", **case}, folder))


@pytest.mark.parametrize("case", taken(FEW, MORE, days=4), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_other_batches(case: Case, tmp_path: Path) -> None:
    predicted, simulated = predicted_and_simulated(asked(case, tmp_path))
    assert predicted == simulated


@pytest.mark.parametrize(("model", "attention"), of_today(READING_IMAGES, 6))
def test_texts_in_one_row_of_a_model_that_reads_images(model: str, attention: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model, **MODELS_WITH_IMAGES[model][0]}))
    job = {
        **ENGINES[2],
        **BATCHES[0],
        "attention": attention,
        "gpu": "H100-80GB",
        "seq_len": "120",
        "micro_batch_size": "3",
    }
    predicted, simulated = predicted_and_simulated(make_request({"model": str(path), **job}))
    assert predicted == simulated


def test_a_masked_model_has_no_sequences_in_one_row(tmp_path: Path) -> None:
    with pytest.raises(NotRecordable, match="generate text"):
        predict(asked({"model": "bert", **ENGINES[0], "padding_free": "true"}, tmp_path))
