"""Peaks of classifiers and of encoders of sound, from their configurations, against PyTorch's own FSDP2 step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

torch = pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor import estimate
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.recording.ctc_loss import ctc_loss

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SOUND = {
    **SMALL,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Wav2Vec2ForCTC": {"model_type": "wav2vec2", **SOUND},
    "HubertForSequenceClassification": {"model_type": "hubert", **SOUND},
    "BertForTokenClassification": {"model_type": "bert", **SMALL, "num_labels": 9},
    "LlamaForSequenceClassification": {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "vocab_size": 1000, "num_labels": 1},
    "ParakeetForCTC": {"model_type": "parakeet_ctc", "encoder_config": SMALL},
    "ASTForAudioClassification": {"model_type": "audio-spectrogram-transformer", **SMALL},
    "ResNetForImageClassification": {"model_type": "resnet", "depths": [1, 1, 1, 1]},
    "ConvNextForImageClassification": {"model_type": "convnext", "depths": [2, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]},
    "CLIPForImageClassification": {
        "model_type": "clip", "vision_config": {**SMALL, "model_type": "clip_vision_model"},
        "text_config": {**SMALL, "model_type": "clip_text_model"},
    },
}  # fmt: skip
TASKS = {
    "Wav2Vec2ForCTC": "ctc", "HubertForSequenceClassification": "audio-classification",
    "BertForTokenClassification": "token-classification",
    "LlamaForSequenceClassification": "sequence-classification", "ParakeetForCTC": "ctc",
    "ASTForAudioClassification": "audio-classification", "ResNetForImageClassification": "image-classification",
    "ConvNextForImageClassification": "image-classification", "CLIPForImageClassification": "image-classification",
}  # fmt: skip
JOB = {"strategy": "zero3", "backend": "fsdp2", "gpus": "2", "seq_len": "64", "micro_batch_size": "2"}


def _config(name: str, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": [name], **CONFIGS[name]}))
    return str(path)


@pytest.mark.parametrize(
    "name",
    taken(["Wav2Vec2ForCTC", "LlamaForSequenceClassification"], [*CONFIGS][1:3] + [*CONFIGS][4:], days=2),
)
def test_peaks_equal_those_of_pytorch(name: str, tmp_path: Path) -> None:
    request = {**JOB, "model": _config(name, tmp_path)}
    if name.startswith(("ResNet", "ConvNext")):  # without attention
        request |= {"attention": "eager", "seq_len": "1"}
    predicted, simulated = predicted_and_simulated(make_request(request))
    assert predicted == simulated


def test_task_is_that_of_the_class_that_the_configuration_names() -> None:
    from fsdp_advisor.recording import TransformersSource

    found = {
        name: TransformersSource({"architectures": [name], **config}, name=name).task
        for name, config in CONFIGS.items()
    }
    assert found == TASKS


@in_turn(1, of=3)
def test_reward_model_is_made_of_a_classifier_too(tmp_path: Path) -> None:
    report = estimate(
        **{**JOB, "model": _config("LlamaForSequenceClassification", tmp_path), "task": "reward", "framework": "trl"}
    )
    assert report.estimates[0].needed_bytes is not None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_allocates_what_pytorchs_does(reduction: str) -> None:
    """The tensor that the loss keeps has the shape of PyTorch's own, and the result has that of the reduction."""
    log_probs = torch.randn(9, 2, 5, requires_grad=True)
    targets, frames, labels = torch.tensor([1, 2, 3, 1, 2]), torch.tensor([9, 9]), torch.tensor([3, 2])
    _, log_alpha = torch._ctc_loss(log_probs, targets, frames, labels)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = ctc_loss(log_probs, targets, frames, labels, reduction=reduction, zero_infinity=True)
    assert log_alpha.shape in [tensor.shape for tensor in kept]
    own = torch.nn.functional.ctc_loss(log_probs, targets, frames, labels, reduction=reduction)
    assert loss.shape == own.shape and loss.dtype == own.dtype
    loss.sum().backward()
    assert log_probs.grad is not None
