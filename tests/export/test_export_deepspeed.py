"""DeepSpeed's own configuration class reads every file, and every top-level key."""

from __future__ import annotations

import inspect
import json
import os
from types import SimpleNamespace
from typing import Any, get_args

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.config
import torch
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.config import (
    ADAMW_OPTIMIZER,
    DEEPSPEED_OPTIMIZERS,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
    DeepSpeedConfig,
)
from export_jobs import RANKS, job, jobs, plan

from fsdp_advisor.engines.deepspeed.settings import DEFAULTS
from fsdp_advisor.export import export
from fsdp_advisor.export.model_arguments import model_arguments
from fsdp_advisor.job.choices import Backend, Offload, OptimizerName, Precision
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Refusal


class RecordingDict(dict[str, Any]):
    """A dictionary that records which of its keys were read. Copies share the record."""

    def __init__(self, values: dict[str, Any], names: set[str] | None = None) -> None:
        super().__init__(values)
        self.names = set() if names is None else names

    def __copy__(self) -> RecordingDict:
        return RecordingDict(self, self.names)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)


@pytest.fixture(autouse=True)
def _eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: RANKS)
    monkeypatch.setattr(deepspeed.runtime.config, "dist", world)


@pytest.mark.parametrize(
    ("backend", "precision", "dtype"),
    [
        ("deepspeed", "bf16-mixed", "bfloat16"),
        ("deepspeed", "fp16-mixed", "float16"),
        ("fsdp2", "bf16-mixed", "float32"),
    ],
)
def test_scripts_load_weights_in_the_dtype_in_which_deepspeed_keeps_them(
    backend: Backend, precision: Precision, dtype: str
) -> None:
    """DeepSpeed casts weights before it copies fp32 masters of them, so loading them in fp32 would only take memory of the host."""
    assert model_arguments(job(plan("zero3", backend, precision=precision)))["dtype"] == dtype


def test_deepspeed_reads_every_key_of_every_file() -> None:
    """DeepSpeed checks the batch equation, pydantic the nested keys, and RecordingDict the top-level keys."""
    for each in jobs("deepspeed"):
        p = each.plan
        values = RecordingDict(json.loads(export("deepspeed", each).text))
        config = DeepSpeedConfig(values)
        assert set(values) <= values.names, set(values) - values.names
        assert config.train_batch_size == p.micro_batch_size * p.gradient_accumulation_steps * RANKS
        assert config.zero_config.stage == int(p.strategy[-1])
        assert config.bfloat16_config.enabled == p.precision.startswith("bf16")
        assert config.float16_config.enabled == p.precision.startswith("fp16")
        assert config.bfloat16_config.bf16_optimizer_states == (p.precision == "bf16")
        offload = config.zero_config.offload_optimizer
        assert str(offload.device if offload else "none") == (p.offload_device if p.offload != "none" else "none")
        shards = config.zero_config.offload_param
        assert (shards is not None) == (p.offload == "parameters")


def test_every_value_is_an_integer_instead_of_auto() -> None:
    for each in jobs("deepspeed"):
        text = export("deepspeed", each).text
        assert "auto" not in text
        zero = json.loads(text)["zero_optimization"]
        assert all(isinstance(v, int) for k, v in zero.items() if not k.startswith("offload"))


def test_a_plans_own_bucket_sizes_are_written() -> None:
    sizes = "reduce_bucket_size=3000000,stage3_prefetch_bucket_size=1000000"
    for framework in ("deepspeed", "trainer"):
        of = job(plan("zero3", "deepspeed", framework=framework, zero_buckets=sizes))
        zero = json.loads(export("deepspeed", of).text)["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (3_000_000, 1_000_000)


def test_bucket_sizes_equal_those_of_the_estimate() -> None:
    config = DeepSpeedConfig(json.loads(export("deepspeed", job(plan("zero3", "deepspeed"))).text)).zero_config
    assert config.reduce_bucket_size == DEFAULTS.reduce_bucket_size
    assert config.sub_group_size == DEFAULTS.sub_group_size
    assert config.prefetch_bucket_size == DEFAULTS.prefetch_bucket_size
    assert config.param_persistence_threshold == DEFAULTS.param_persistence_threshold
    assert config.max_live_parameters == DEFAULTS.max_live_parameters
    assert config.max_reuse_distance == DEFAULTS.max_reuse_distance


@pytest.mark.parametrize("optim", get_args(OptimizerName))
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_optimizer_section_names_an_optimizer_that_deepspeed_makes(optim: OptimizerName, offload: Offload) -> None:
    optimizer = optimizer_named(optim)
    named = optimizer.deepspeed if offload == "none" else optimizer.deepspeed_offloaded
    each = job(plan("zero2", "deepspeed", offload=offload, optim=optim))
    section = json.loads(export("deepspeed", each).text).get("optimizer")
    if isinstance(named, Refusal):
        assert section is None
        return
    name, arguments = section["type"], dict(section["params"])
    if name.lower() == MUON_OPTIMIZER:
        assert arguments.keys() == {"lr"}
        return
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        assert name.lower() in (ADAMW_OPTIMIZER, LION_OPTIMIZER)
        assert arguments.pop("torch_adam", offload == "none") is (offload == "none")
    made = DeepSpeedCPULion if name == "Lion" else getattr(torch.optim, name)
    assert set(arguments) <= set(inspect.signature(made).parameters)


def test_swap_buffer_is_at_least_the_largest_shard() -> None:
    offload = {"offload": "parameters", "offload_device": "nvme"}
    one = job(plan("zero3", "deepspeed", gpus=1, **offload))
    eight = job(plan("zero3", "deepspeed", **offload))
    sizes = [
        json.loads(export("deepspeed", j).text)["zero_optimization"]["offload_param"]["buffer_size"]
        for j in (one, eight)
    ]
    assert sizes == [32_000 * 4096, 100_000_000]
