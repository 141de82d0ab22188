"""Steps of adapters on a base whose experts axolotl packs in 4 bits, on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import taken
from rehearsed_jobs import has_axolotl, requested_bytes, row_of
from test_liger import EXPERTS, SHAPES

pytestmark = pytest.mark.slow

Job = tuple[dict[str, Any], bool, int, int]


def _job(model: str, *, checkpoints: bool = False) -> Job:
    return {"model_type": model, **SHAPES, **EXPERTS}, checkpoints, 2, 2000


JOBS: dict[str, Job] = {
    "qwen3_moe": _job("qwen3_moe"),
    "qwen3_moe, checkpointed": _job("qwen3_moe", checkpoints=True),
    "mixtral": _job("mixtral"),
}
CASES: dict[str, Job] = dict(taken(list(JOBS.items()), [], days=3))


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]], rehearsal_python: Path) -> dict[str, int]:
    if not has_axolotl(rehearsal_python):
        pytest.skip("the environment of rehearsals has no axolotl")
    return run("packed_experts.py", json.dumps(CASES))


@pytest.mark.parametrize("name", CASES)
def test_packed_experts_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, checkpoints, batch, length = CASES[name]
    row = row_of(
        tmp_path, config, framework="axolotl", micro_batch_size=batch, seq_len=length, use_peft=True, lora_r=8,
        lora_target_modules="q_proj,v_proj", lora_kernels="none", load_in_4bit=True, quantize_moe_experts=True,
        activation_checkpointing="full" if checkpoints else "none", allocator_conf="expandable_segments:False",
    )  # fmt: skip
    assert requested_bytes(row) == pytest.approx(peaks[name], rel=2e-4)  # tensors are rounded to 512 bytes
