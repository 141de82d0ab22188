"""Tokens and pixels of images against those of transformers' own processors (`image_layouts.py`), and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.images import Images
from fsdp_advisor.model.images import layout_of

with Path(__file__).with_name("image_layouts.csv").open(newline="") as file:
    ROWS = list(csv.DictReader(file))
VALUES: dict[str, dict[str, Any]] = {
    "smolvlm": {"vision_config": {"image_size": 384, "patch_size": 16}, "scale_factor": 4},
    "llama4": {"vision_config": {"image_size": 336}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
}
"""What the processors' classes have and the configurations' classes do not; Gemma 4 has a vision tower only if one is described."""


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['model_type']}-{row['width']}x{row['height']}-{row['max_pixels']}"
)
def test_an_image_has_the_tokens_and_pixels_of_the_processor(row: dict[str, str]) -> None:
    images = Images(1, int(row["height"]), int(row["width"]), int(row["max_pixels"]))
    layout = layout_of({"model_type": row["model_type"], **VALUES.get(row["model_type"], {})}, images)
    assert (layout.tokens, "x".join(map(str, layout.pixels))) == (int(row["tokens"]), row["pixels"])


def test_fixed_images_need_no_size() -> None:
    gemma = layout_of({"model_type": "gemma3", "vision_config": {"image_size": 896}}, Images(1, 0, 0, 0))
    assert (gemma.tokens, gemma.pixels) == (256, (3, 896, 896))
    assert layout_of({"model_type": "llava"}, Images(1, 0, 0, 0)).tokens == 576


@pytest.mark.parametrize(
    ("model_type", "tower", "tokens"),
    [
        ("llava", {"model_type": "clip_vision_model"}, 49),
        ("llava", {"model_type": "siglip_vision_model", "image_size": 384}, 576),
        ("llava", {"patch_size": 14}, 256),
        ("paligemma", {"model_type": "siglip_vision_model"}, 196),
        ("mistral3", {"model_type": "pixtral"}, 14 * 14),
    ],
)
def test_a_described_vision_tower_has_the_defaults_of_its_own_class(
    model_type: str, tower: dict[str, Any], tokens: int
) -> None:
    assert layout_of({"model_type": model_type, "vision_config": tower}, Images(1, 448, 448, 0)).tokens == tokens


@pytest.mark.parametrize(
    ("model_type", "size", "message"),
    [
        ("qwen2_5_vl", 0, "depends on its size"),
        ("llama", 0, "has no vision encoder"),
        ("gemma4", 448, "has no vision encoder"),
    ],
)
def test_images_that_cannot_be_laid_out_are_refused(model_type: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layout_of({"model_type": model_type}, Images(1, size, size, 0))
