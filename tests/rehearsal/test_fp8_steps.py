"""Steps whose linear layers torchao converts to fp8 on a simulated GPU, as they are and compiled, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of
from test_compiled import ENGINES, SHAPES

pytestmark = [in_turn(4, of=5), pytest.mark.usefixtures("torchao")]

LLAMA = {"model_type": "llama", **SHAPES}
BATCH, LENGTH = 16, 4000
"""Large, because a block of the allocator is up to 1 MiB larger than its tensor: those of the optimizer differ by 1.3 MiB from the
prediction after a first step that compiles, while requested bytes agree within 0.03 %."""
Job = tuple[dict[str, Any], str, str, str, int, int, str, str]


def _job(engine: str, precision: str, checkpointing: str, compiled: str, fp8: str) -> Job:
    return LLAMA, engine, precision, checkpointing, BATCH, LENGTH, compiled, fp8


FEW = [("ddp", "bf16-mixed", "none", "none", "rowwise"), ("fsdp2", "bf16-mixed", "full", "layer", "tensorwise")]
MORE = [
    words
    for words in product(
        ENGINES, ("bf16", "bf16-mixed"), ("none", "full"), ("none", "layer"), ("tensorwise", "rowwise")
    )
    if words not in FEW
]
CASES: dict[str, Job] = {" ".join(words): _job(*words) for words in taken(FEW, MORE, days=2)}
"""Configuration, engine, precision, checkpointing, micro-batch, sequence length, compilation, recipe."""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("compiled.py", json.dumps(CASES))


@pytest.mark.parametrize("name", CASES)
def test_layers_in_fp8_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, engine, precision, checkpointing, batch, length, compiled, fp8 = CASES[name]
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, activation_checkpointing=checkpointing,
        compile=compiled, fp8=fp8, **ENGINES[engine],
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
