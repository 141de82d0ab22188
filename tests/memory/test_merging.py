"""Merging adapters: what PEFT's own `merge_and_unload` allocates on the CPU, against the predicted bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")


from peft import LoraConfig, get_peft_model
from tiny_llama import LLAMA as CONFIG
from transformers import AutoModelForCausalLM, LlamaConfig

import fsdp_advisor
from fsdp_advisor.program.storages import Storages
from fsdp_advisor.recording.storages import StorageWatch

pytestmark = pytest.mark.slow

TARGETS = "q_proj,v_proj,down_proj"


def predicted(folder: Path, **options: Any) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    lora = {} if "peft_config" in options else {"use_peft": True, "lora_target_modules": TARGETS}
    report = fsdp_advisor.estimate(model=str(path), gpu="H100", seq_len=64, **lora, **options)
    (row,) = report.estimates
    assert row.job_peaks is not None
    return row.job_peaks.as_dict()


class Peak:
    """The highest sum of the storages that a StorageWatch sees, each rounded up to 512 bytes."""

    def __init__(self) -> None:
        self.alive = self.highest = 0

    def __call__(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        self.alive += Storages.of(after).rounded - Storages.of(before).rounded
        self.highest = max(self.highest, self.alive)


def merged(model: Any) -> Peak:
    """The peak of what merging allocates. The model's tensors before it do not count."""
    peak = Peak()
    watch = StorageWatch(peak)
    for tensor in (*model.parameters(), *model.buffers()):
        watch.ignore(tensor)
    with watch:
        model.merge_and_unload()
    return peak


def test_merging_needs_the_product_of_the_largest_adapter_twice(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=TARGETS.split(",")))
    job = predicted(tmp_path, gpus=1, strategy="ddp", precision="fp32")
    kept = job["save"]["gpu_bytes"]
    assert job["merge"]["gpu_bytes"] - kept == merged(adapted).highest > 0
    (file,) = job["merge"]["files"]
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    assert file["tensor_bytes"] == 4 * sum(p.numel() for p in whole.parameters())


def test_a_sharded_model_merges_on_the_host(tmp_path: Path) -> None:
    job = predicted(tmp_path, gpus=2, strategy="zero3")
    assert job["merge"]["gpu_bytes"] == 0
    assert job["merge"]["host_bytes_per_node"] > job["merge"]["files"][0]["tensor_bytes"]


def test_other_forms_have_no_figure_for_merging(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LOHA", "r": 8, "target_modules": TARGETS.split(",")}))
    assert "merge" not in predicted(tmp_path, gpus=1, strategy="ddp", peft_config=str(path))
