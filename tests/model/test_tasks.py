"""Tasks: the unit of throughput and the sequence length."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor.advice import recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate
from fsdp_advisor.model import catalog
from fsdp_advisor.model.tasks import TASKS, task_of

VIT = "google/vit-base-patch16-224"
JOB: dict[str, Any] = {"model": VIT, "gpus": 2, "gpu": "H100", "strategy": "ddp", "micro_batch_size": 8}


def test_every_task_of_the_recorder_and_the_catalog_is_known() -> None:
    recorder = pytest.importorskip("fsdp_advisor.recording.transformers_models")
    assert set(TASKS) == set(recorder.TASKS)
    assert {entry.task for entry in catalog.entries()} <= set(TASKS)
    assert task_of(None).takes_any_length and task_of("a module's").counted == "tokens"


@pytest.mark.parametrize("entry", catalog.search("image-classification"), ids=lambda e: e.id)
def test_image_length_is_the_number_of_patches_plus_one(entry: catalog.Entry) -> None:
    config = catalog.profile(entry).config
    patches = (int(str(config["image_size"])) // int(str(config["patch_size"]))) ** 2
    assert catalog.profile(entry).image_tokens == patches + 1  # one token for the class


def test_text_model_has_no_image_tokens() -> None:
    entry = catalog.find("google-bert/bert-base-cased")
    assert entry is not None and catalog.profile(entry).image_tokens is None


def test_image_length_ignores_the_requested_sequence_length() -> None:
    said, own, none = (estimate(**JOB, seq_len=n) for n in (2048, 197, None))
    assert said.seq_len == own.seq_len == none.seq_len == 197
    assert said.notes == ("seq_len 2048 is ignored: the model reads images of 197 tokens",)
    assert own.notes == none.notes == ()
    (one,) = said.estimates
    (other,) = none.estimates
    assert one.as_dict() == other.as_dict()
    assert one.step is not None
    assert one.step.tokens_per_second_per_gpu == pytest.approx(8 * 197 / one.step.seconds)


def test_image_length_is_not_searched() -> None:
    with pytest.raises(UsageError, match="reads images of 197 tokens and cannot read another length"):
        recommend(model=VIT, gpus=2, gpu="H100", find="sequence")
    advice = recommend(
        model=VIT, gpus=1, gpu="2GiB", offload="none", micro_batch_size=64, activation_checkpointing="none"
    )
    assert advice.recommendation.winner is None
    assert "tokens instead of" not in str(advice.as_dict())
