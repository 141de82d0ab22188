"""Images in the samples of a job: what an answer says of them, what they change, and which jobs cannot have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn
from vision_models import config_of, options_of

from fsdp_advisor import estimate
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.report import Report

pytestmark = pytest.mark.slow

IMAGES = {"images_per_sample": 2, "image_size": "308x224"}


def report(folder: Path, **options: Any) -> Report:
    path = folder / "config.json"
    path.write_text(json.dumps(config_of("qwen2_5_vl")))
    return estimate(model=str(path), **{"gpu": "H100-80GB", "strategy": "ddp", "seq_len": 400, **options})


@in_turn(0, of=3)
def test_images_take_a_part_of_the_tokens_and_need_memory_and_time(tmp_path: Path) -> None:
    (text,), with_images = report(tmp_path).estimates, report(tmp_path, **options_of("qwen2_5_vl"))
    (images,) = with_images.estimates
    assert images.peak_tensor_bytes > text.peak_tensor_bytes
    assert images.step.seconds > text.step.seconds
    notes = " ".join(with_images.notes)
    assert "each image is 88 tokens: 176 of the 400 tokens" in notes
    assert "--freeze visual" in notes and "training on text only" not in notes
    frozen = report(tmp_path, freeze="visual", **options_of("qwen2_5_vl"))
    assert frozen.trainable_parameters < with_images.trainable_parameters
    assert frozen.estimates[0].step.seconds < images.step.seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 170}, "leaves no text"),
        ({"image_size": None}, "depends on its size"),
        ({"padding_free": True}, "not modelled"),
        ({"task": "dpo", "framework": "trl"}, "not for dpo"),
    ],
)
def test_images_that_a_job_cannot_have_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        report(tmp_path, **{**IMAGES, **options})


def test_a_language_model_reads_no_images() -> None:
    with pytest.raises(UsageError, match="has no vision encoder"):
        estimate(model="gpt2", strategy="ddp", **IMAGES)


def test_a_size_without_a_number_of_images_is_ignored() -> None:
    request = make_request({"model": "gpt2", "strategy": "ddp", "image_size": "448"})
    assert request.image_size == "448x448"
    assert plans(request, seq_len=128)[0].images is None
