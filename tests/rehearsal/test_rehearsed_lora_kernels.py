"""Steps with axolotl's kernels for adapters on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import has_axolotl, requested_bytes, row_of
from test_liger import SHAPES

pytestmark = [pytest.mark.slow, in_turn(3, of=5)]

Job = tuple[dict[str, Any], bool, bool, float, list[str], int, int]


def _job(
    model: str, *, packs: bool = False, checkpoints: bool = False, dropout: float = 0.0, off: tuple[str, ...] = ()
) -> Job:
    return {"model_type": model, **SHAPES}, packs, checkpoints, dropout, list(off), 4, 4000


JOBS: dict[str, Job] = {
    "QLoRA of llama": _job("llama", packs=True),
    "LoRA of qwen3 with dropout, checkpointed": _job("qwen3", checkpoints=True, dropout=0.1),
}
MORE: dict[str, Job] = {
    f"{model}, 4 bits {packs}, checkpoints {checkpoints}, dropout {dropout}": _job(
        model, packs=packs, checkpoints=checkpoints, dropout=dropout
    )
    for model, packs, checkpoints, dropout in product(
        ("llama", "qwen2", "mistral", "gemma", "gemma3_text"), (False, True), (False, True), (0.0, 0.1)
    )
} | {
    f"llama without {key}": _job("llama", off=(key,)) for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
}
CASES: dict[str, Job] = dict(taken(list(JOBS.items()), list(MORE.items()), days=3))


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]], rehearsal_python: Path) -> dict[str, int]:
    if not has_axolotl(rehearsal_python):
        pytest.skip("the environment of rehearsals has no axolotl")
    return run("lora_kernels.py", json.dumps(CASES))


@pytest.mark.parametrize("name", CASES)
def test_axolotls_kernels_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, packs, checkpoints, dropout, off, batch, length = CASES[name]
    base: dict[str, Any] = {"load_in_4bit": True, "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    on = [part for part in ("mlp", "qkv", "o", "embedding") if f"lora_{part}_kernel" not in off]
    row = row_of(
        tmp_path, config, framework="axolotl", micro_batch_size=batch, seq_len=length, use_peft=True, lora_r=8, lora_dropout=dropout,
        lora_target_modules="all-linear", lora_kernels=",".join(on) if off else "auto", allocator_conf="expandable_segments:False",
        activation_checkpointing="full" if checkpoints else "none", **(base if packs else {}),
    )  # fmt: skip
    assert requested_bytes(row) == pytest.approx(peaks[name], rel=2e-4)  # tensors are rounded to 512 bytes
