"""Predicted peaks with losses without whole logits against PyTorch's engines around the same model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase. `tests/rehearsal/test_losses.py` compares the
losses themselves with the libraries' code.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import taken

pytest.importorskip("torch")

from fsdp_advisor.errors import NotRecordable  # after the check
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

_DECODER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 70_001,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "model_type": "llama", "num_key_value_heads": 2},
    "qwen3": {**_DECODER, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "mistral": {**_DECODER, "model_type": "mistral", "num_key_value_heads": 2},
    "phi3": {**_DECODER, "model_type": "phi3", "num_key_value_heads": 4, "pad_token_id": 0},
    "mixtral": {**_DECODER, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    "olmo2": {**_DECODER, "model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 50_257, "n_positions": 512},
    "bert": {**_DECODER, "model_type": "bert"},
}  # fmt: skip
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

Case = dict[str, str]


def _complete(case: Case) -> Case:
    return case | {k: v for option in case for k, v in NEEDED.get((case["model"], option), {}).items()}


def _names(case: Case) -> str:
    return " ".join(value if name == "model" else f"{name}={value}" for name, value in case.items())


FEW: list[Case] = [
    {"model": "llama", "loss": "chunked", **ENGINES[2], **VARIATIONS[4]},
    {"model": "qwen3", "loss": "liger", **ENGINES[3], **VARIATIONS[2]},
    {"model": "llama", "loss": "cce", **ENGINES[1], **VARIATIONS[6]},
    {"model": "llama", "loss": "chunked", **ENGINES[0], **VARIATIONS[5]},
    {"model": "qwen3", "loss": "chunked", **ENGINES[2], **VARIATIONS[3]},
]
MORE: list[Case] = [
    _complete({"model": model, "loss": loss, **ENGINES[(m + i) % 4], **VARIATIONS[(3 * m + i) % len(VARIATIONS)]})
    for i, ((m, model), loss) in enumerate(
        product(enumerate(name for name in CONFIGS if name != "bert"), ("chunked", "liger", "cce") * 5)
    )
    if (model, loss) != ("gpt2", "liger")
]


def predicted(case: Case, folder: Path) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[case["model"]]))
    return predict(make_request({"seq_len": "128", "micro_batch_size": "2", **case, "model": str(path)}))


@pytest.mark.parametrize("case", taken(FEW, MORE), ids=_names)
def test_predicted_peaks_equal_pytorch_with_a_loss_in_tiles(case: Case, tmp_path: Path) -> None:
    prediction = predicted(case, tmp_path)
    assert prediction.predicted["phase_peaks"] == simulate(prediction.source(), prediction.plan).phase_peaks


def test_no_loss_in_tiles_holds_the_logits(tmp_path: Path) -> None:
    case = {
        "model": "llama",
        **ENGINES[0],
        "micro_batch_size": "20",
        "seq_len": "500",
        "activation_checkpointing": "full",
    }
    logits = 20 * 500 * _DECODER["vocab_size"] * 2
    assert predicted({**case, "loss": "cce"}, tmp_path).predicted["phase_peaks"]["backward"] < logits


@pytest.mark.parametrize(("model", "loss"), [("bert", "cce"), ("gpt2", "liger")])
def test_a_model_that_the_loss_is_not_made_for_is_refused(model: str, loss: str, tmp_path: Path) -> None:
    with pytest.raises(NotRecordable, match="loss"):
        predicted({"model": model, "loss": loss, **ENGINES[0]}, tmp_path)
