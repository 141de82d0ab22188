"""Steps of vision-language models with images on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(1, of=3)

TEXT: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 152_064,
}  # fmt: skip
QWEN_TOWER = {"depth": 4, "hidden_size": 512, "num_heads": 8, "intermediate_size": 1024, "out_hidden_size": 1024}
TOWER = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}
Job = tuple[dict[str, Any], str, tuple[int, int, int, int], int, int]
FEW: dict[str, Job] = {
    "internvl": (
        {
            "model_type": "internvl", "vision_config": {**TOWER, "image_size": [448, 448]}, "image_seq_length": 256,
            "text_config": {**TEXT, "model_type": "qwen2"},
        },
        "bf16", (1, 900, 900, 0), 2, 2048,
    ),
}  # fmt: skip
MORE: dict[str, Job] = {
    "qwen3_vl, autocast": (
        {
            "model_type": "qwen3_vl", "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]},
            "text_config": TEXT | {"head_dim": 128},
        },
        "bf16-mixed", (2, 1024, 768, 0), 2, 2048,
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2_5_vl", "vision_config": QWEN_TOWER | {"fullatt_block_indexes": [3]}, "text_config": TEXT},
        "bf16", (1, 1022, 1022, 0), 2, 1600,
    ),
    "gemma3, autocast": (
        {
            "model_type": "gemma3", "mm_tokens_per_image": 256,
            "vision_config": {**TOWER, "image_size": 896, "patch_size": 14, "vision_use_head": False},
            "text_config": {**TEXT, "vocab_size": 262_208, "head_dim": 128},
        },
        "bf16-mixed", (1, 0, 0, 0), 2, 1024,
    ),
}  # fmt: skip
CASES: dict[str, Job] = dict(taken(list(FEW.items()), list(MORE.items())))
"""Configuration, precision, images, micro-batch, sequence length."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("images.py", json.dumps(CASES))


@pytest.mark.parametrize("name", CASES)
def test_images_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, precision, (number, height, width, _), batch, length = CASES[name]
    size = {"image_size": f"{width}x{height}"} if height else {}
    row = row_of(
        tmp_path, config, gpus=1, precision=precision, micro_batch_size=batch,
        seq_len=length, images_per_sample=number, **size,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
