"""Runs of fms-acceleration's benchmark that its repository publishes: fms-hf-tuning's own command, which is TRL's SFTTrainer.

The facts of each row are in `measurements.json`; those of all rows are in `published_jobs.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_jobs import Measurement, measurements

from fsdp_advisor.model.resolve import resolve

SANTACODER = Path(__file__).with_name("santacoder.json")
SCRIPT = Path(__file__).parent / "scripts" / "fms_sft.py"
_SHARDED = (
    "--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_sharding_strategy", "FULL_SHARD",
    "--fsdp_backward_prefetch", "BACKWARD_PRE", "--fsdp_use_orig_params", "true", "--fsdp_sync_module_states", "true",
    "--fsdp_cpu_ram_efficient_loading", "true", "--fsdp_state_dict_type", "SHARDED_STATE_DICT",
)  # fmt: skip
"""scripts/benchmarks/accelerate.yaml."""


@dataclass(frozen=True)
class FmsRun:
    """One row without the kernels of fms-acceleration, of packed sequences."""

    row: Measurement

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def source(self) -> str:
        return self.row.source

    @property
    def gpu(self) -> str:
        return "A100-80GB"

    @property
    def random_data(self) -> bool:
        return False  # the command writes its own configuration

    @property
    def gpus(self) -> int:
        return int(self.row.job["gpus"])

    @property
    def model(self) -> str:
        return str(self.row.job["model"])

    @property
    def measured_bytes(self) -> int:
        return int(self.row.measured["allocated_bytes"])

    @property
    def name(self) -> str:
        job = self.row.job
        method = "LoRA" if "r" in job else "full"
        return f"{self.model.rpartition('/')[2]} {method}, {self.gpus} x {job['per_device_train_batch_size']} x {job['seq_len']}"

    def command(self, python: Path, folder: Path) -> list[str]:
        """The command. Writes the model's config.json into the folder."""
        (folder / "config.json").write_text(json.dumps(_config(self.model)))
        launcher = (
            ["-m", "accelerate.commands.launch", *_SHARDED, "--num_processes", str(self.gpus)] if self.gpus > 1 else []
        )
        return [str(python), *launcher, str(SCRIPT), str(folder), *self._words()]

    def _words(self) -> list[str]:
        """The arguments of the command, as scripts/benchmarks/defaults.yaml and scenarios.yaml set them."""
        job = self.row.job
        options: dict[str, Any] = {
            "packing": True, "max_seq_len": job["seq_len"], "max_steps": 100, "gradient_checkpointing": True,
            "use_flash_attn": True, "torch_dtype": "bfloat16", "learning_rate": 2e-5, "save_strategy": "no",
            "per_device_train_batch_size": job["per_device_train_batch_size"], "include_tokens_per_second": True,
            "logging_strategy": "steps", "logging_steps": 10,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if "r" not in job:
            return words
        adapter = [
            "--peft_method",
            "lora",
            "--r",
            str(job["r"]),
            "--lora_alpha",
            "16",
            "--lora_dropout",
            str(job["lora_dropout"]),
        ]
        return [*words, *adapter, "--target_modules", *job["target_modules"]]


def _config(model: str) -> dict[str, Any]:
    if "santacoder" in model:
        return dict(json.loads(SANTACODER.read_text()))
    profile = resolve(model).profile
    assert profile is not None
    return dict(profile.config)


def _is_run(row: Measurement) -> bool:
    job = row.job
    return (
        row.family == "fms-acceleration" and job["framework_config"] == "none" and row.method in ("full", "lora")
        and job["precision"] == "pure bfloat16" and "seq_len" in job and job["gpus"] <= 2
        and "allocated_bytes" in row.measured and "Mixtral" not in job["model"]
    )  # fmt: skip


FMS = tuple(FmsRun(row) for row in measurements() if _is_run(row))
