"""Merging adapters: what PEFT's own `merge_and_unload` allocates on a simulated GPU, against the predicted bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matrix import in_turn
from tiny_llama import LLAMA

import fsdp_advisor

pytestmark = in_turn(2, of=5)

CONFIG = LLAMA | {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048}
TARGETS = "q_proj,v_proj"
"""The largest matrix is the first, so nothing is freed before it merges."""
BASES: dict[str, tuple[int | None, bool, dict[str, Any]]] = {
    "bf16": (None, False, {}),
    "8 bits": (8, False, {"load_in_8bit": True}),
    "4 bits": (4, False, {"load_in_4bit": True}),
    "4 bits nested": (4, True, {"load_in_4bit": True, "use_bnb_nested_quant": True}),
}
METHODS: dict[str, dict[str, Any]] = {"LoRA": {}, "DoRA": {"use_dora": True}}


def predicted(path: Path, **options: Any) -> int:
    report = fsdp_advisor.estimate(
        model=str(path), gpu="H100", gpus=1, strategy="ddp", use_peft=True, lora_r=16, lora_target_modules=TARGETS,
        dtype="bfloat16", seq_len=64, **options,
    )  # fmt: skip
    (row,) = report.estimates
    assert row.job_peaks is not None
    job = row.job_peaks.as_dict()
    return int(job["merge"]["gpu_bytes"] - job["save"]["gpu_bytes"])


@in_turn(0, of=2)
def test_merging_allocates_what_is_predicted(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    cases = {
        f"{m} {b}": (bits, nested, "float32", m == "DoRA") for m in METHODS for b, (bits, nested, _) in BASES.items()
    }
    found = run("merging.py", str(path), TARGETS, json.dumps(cases))
    options = {f"{m} {b}": METHODS[m] | base for m in METHODS for b, (_, _, base) in BASES.items()}
    assert found == {name: predicted(path, **each) for name, each in options.items()}
