"""Steps of vision-language models with images on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = in_turn(1, of=5)

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
    return run("images.py", json.dumps({name: [*job, False] for name, job in CASES.items()}))


@pytest.mark.parametrize("name", CASES)
def test_images_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, precision, (number, height, width, _), batch, length = CASES[name]
    size = {"image_size": f"{width}x{height}"} if height else {}
    row = row_of(
        tmp_path, config, gpus=1, precision=precision, micro_batch_size=batch,
        seq_len=length, images_per_sample=number, **size,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)


SMALL_TEXT: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 152_064,
}  # fmt: skip
"""A small language model, so that the masks of 4,096 tokens get their values and the vision encoder counts."""
LIGER: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "gemma3": (
        {
            "mm_tokens_per_image": 256, "text_config": {**SMALL_TEXT, "vocab_size": 262_208},
            "vision_config": {**TOWER, "image_size": 896, "patch_size": 14, "vision_use_head": False},
        },
        (2, 0, 0, 0),
    ),
    "glm4v": ({"vision_config": QWEN_TOWER | {"out_hidden_size": 256}, "text_config": SMALL_TEXT}, (2, 1024, 768, 0)),
    "internvl": (
        {
            "vision_config": {**TOWER, "image_size": [448, 448]}, "image_seq_length": 256,
            "text_config": {**SMALL_TEXT, "model_type": "qwen2"},
        },
        (1, 1344, 900, 0),
    ),
    "llava": (
        {
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "image_size": 448, "patch_size": 14, "projection_dim": 512},
            "text_config": {**SMALL_TEXT, "model_type": "llama"},
        },
        (2, 0, 0, 0),
    ),
    "smolvlm": (
        {
            "vision_config": {**TOWER, "image_size": 512, "patch_size": 16}, "scale_factor": 4,
            "text_config": {**SMALL_TEXT, "model_type": "llama"},
        },
        (1, 900, 900, 0),
    ),
}  # fmt: skip
"""Configuration and images of the models that Liger's kernels are modelled for."""
LIGER_CASES: dict[str, Job] = {
    f"{model}, {precision}": ({"model_type": model, **LIGER[model][0]}, precision, LIGER[model][1], 1, 4096)
    for model, precision in taken(
        [("gemma3", "bf16-mixed"), ("glm4v", "bf16"), ("internvl", "bf16")],
        [
            ("gemma3", "bf16"), ("glm4v", "bf16-mixed"), ("internvl", "bf16-mixed"), ("llava", "bf16"), ("llava", "bf16-mixed"),
            ("smolvlm", "bf16"), ("smolvlm", "bf16-mixed"),
        ],
        days=2,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def peaks_with_liger(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("images.py", json.dumps({name: [*job, True] for name, job in LIGER_CASES.items()}))


@pytest.mark.parametrize("name", LIGER_CASES)
def test_images_with_ligers_kernels_need_what_is_predicted(
    name: str, peaks_with_liger: dict[str, int], tmp_path: Path
) -> None:
    config, precision, (number, height, width, _), batch, length = LIGER_CASES[name]
    size = {"image_size": f"{width}x{height}"} if height else {}
    row = row_of(
        tmp_path, config, gpus=1, precision=precision, micro_batch_size=batch, seq_len=length, framework="trainer",
        use_liger_kernel=True, images_per_sample=number, **size,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks_with_liger[name], rel=1e-3)
