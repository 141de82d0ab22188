"""TrainingArguments, accelerate's plugin and DeepSpeed read every exported file as the plan describes."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.config
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from deepspeed.runtime.config import DeepSpeedConfig
from export_jobs import HIDDEN, RANKS, job, jobs, plan
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from fsdp_advisor.engines.deepspeed.settings import DEFAULTS
from fsdp_advisor.export import TARGETS, Job, export
from fsdp_advisor.export.checkpointing import is_of_model
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.plan import Plan

AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


@pytest.fixture(autouse=True)
def _gpu_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    world = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: RANKS)
    monkeypatch.setattr(deepspeed.runtime.config, "dist", world)
    with mock.patch.dict(os.environ):
        yield


def ran(of: Job) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(export("trainer", of).text, "training_arguments.py", "exec"), names)
    return names


def test_training_arguments_match_the_plan(tmp_path: Path) -> None:
    for each in (j for j in jobs("trainer") if j.plan.backend != "deepspeed"):
        p = each.plan
        names = ran(each)
        arguments = names["training_arguments"](output_dir=str(tmp_path), use_cpu=True)
        assert isinstance(arguments, TrainingArguments)
        assert (arguments.bf16, arguments.fp16) == (p.precision == "bf16-mixed", p.precision == "fp16-mixed")
        assert arguments.per_device_train_batch_size == p.micro_batch_size
        assert arguments.gradient_accumulation_steps == p.gradient_accumulation_steps
        assert names["MODEL_ARGUMENTS"]["dtype"] == ("bfloat16" if p.precision == "bf16" else "float32")
        sharded = p.backend != "ddp"
        assert bool(arguments.fsdp) == sharded
        assert bool(arguments.activation_checkpointing) == (not sharded and p.activation_checkpointing == "full")
        if sharded and p.gradient_accumulation_steps > 1:
            described = arguments.accelerator_config.gradient_accumulation_kwargs
            # otherwise the Trainer reduces after the last micro-batch
            assert (described == {"sync_each_batch": True}) == (p.framework == "torch")
        replicas = arguments.parallelism_config
        assert (replicas is not None) == (p.backend == "fsdp2" and p.strategy == "hsdp" and p.replica_degree > 1)
        if replicas is not None:
            assert (replicas.dp_replicate_size, replicas.dp_shard_size) == (p.replica_degree, p.shard_degree)


def test_transformers_reads_every_fsdp_key() -> None:
    read = set(re.findall(r'"(\w+)"', inspect.getsource(TrainingArguments._process_fsdp_args)))
    for each in jobs("trainer"):
        assert set(written(each).get("fsdp_config", {})) <= read


def written(of: Job) -> dict[str, Any]:
    """The keyword arguments of the file, before TrainingArguments processes them."""
    names = ran(of)
    names["TrainingArguments"] = dict
    found: dict[str, Any] = names["training_arguments"]()
    return found


def test_fsdp_plugin_matches_the_plan(tmp_path: Path) -> None:
    for each in (j for j in jobs("trainer") if j.plan.backend in ("fsdp1", "fsdp2")):
        p = each.plan
        arguments = ran(each)["training_arguments"](output_dir=str(tmp_path), use_cpu=True)
        with mock.patch.dict(os.environ):
            plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        assert plugin.fsdp_version == int(p.backend[-1])
        assert plugin.transformer_cls_names_to_wrap in (["LlamaDecoderLayer"], "LlamaDecoderLayer")
        assert plugin.activation_checkpointing == (p.activation_checkpointing == "full")
        if p.backend == "fsdp2":
            assert plugin.reshard_after_forward is (p.strategy in ("zero3", "hsdp"))
            assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") == (p.offload == "parameters")
        else:
            assert p.strategy == "zero3"  # transformers supports no other
            assert plugin.reshard_after_forward.name == "FULL_SHARD"
            assert plugin.cpu_offload.offload_params == (p.offload == "parameters")
            prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}[p.backward_prefetch]
            assert getattr(plugin.backward_prefetch, "name", None) == prefetch


def test_deepspeed_loads_the_configuration_filled_in_by_the_trainer(tmp_path: Path) -> None:
    """The Trainer replaces "auto"; DeepSpeed loads the result for the planned number of ranks."""
    for each in (j for j in jobs("trainer") if j.plan.backend == "deepspeed"):
        p = each.plan
        arguments = ran(each)["training_arguments"](output_dir=str(tmp_path), use_cpu=True, deepspeed=None)
        found = written(each)
        config = HfTrainerDeepSpeedConfig(found["deepspeed"])
        with mock.patch.object(TrainingArguments, "world_size", RANKS):
            arguments.bf16, arguments.fp16 = found.get("bf16", False), found.get("fp16", False)
            config.trainer_config_process(arguments)
            config.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=4096)), 100)
        loaded = DeepSpeedConfig(config.config)
        assert loaded.train_batch_size == p.micro_batch_size * p.gradient_accumulation_steps * RANKS
        assert loaded.zero_config.stage == int(p.strategy[-1])
        assert loaded.bfloat16_config.enabled == p.precision.startswith("bf16")
        assert "auto" not in str(config.config)
        buckets = (loaded.zero_config.reduce_bucket_size, loaded.zero_config.prefetch_bucket_size)
        filled = HfTrainerDeepSpeedConfig(dict(found["deepspeed"]) | {"zero_optimization": AUTO | {"stage": 3}})
        filled.trainer_config_process(arguments)
        filled.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN)), 100)
        auto = filled.config["zero_optimization"]
        if p.framework == "trainer":  # the values that the Trainer fills in
            assert buckets[0] == auto["reduce_bucket_size"]
            assert p.strategy != "zero3" or buckets[1] == auto["stage3_prefetch_bucket_size"]
        else:
            assert buckets == (DEFAULTS.reduce_bucket_size, DEFAULTS.prefetch_bucket_size)


@pytest.mark.parametrize("of", [plan("ddp", "ddp"), plan("zero3", "fsdp2", activation_checkpointing="full")], ids=str)
def test_the_trainer_compiles_the_model_as_planned(of: Plan, tmp_path: Path) -> None:
    """With checkpointing of the model's own, whose wrappers are not compiled."""
    compiled = job(replace(of, compile="model", framework="trainer"))
    arguments = ran(compiled)["training_arguments"](output_dir=str(tmp_path), use_cpu=True)
    assert (arguments.torch_compile, arguments.torch_compile_backend, arguments.torch_compile_mode) == (
        True, "inductor", "default",
    )  # fmt: skip
    plugin = TorchDynamoPlugin(backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode)
    assert (plugin.backend.name, plugin.mode, plugin.use_regional_compilation) == ("INDUCTOR", "default", False)
    assert bool(arguments.activation_checkpointing) == (of.activation_checkpointing == "full")
    assert "'activation_checkpointing': True" not in str(written(compiled).get("fsdp_config"))
    assert "torch_compile" not in export("trainer", job(of)).text


@pytest.mark.parametrize("changes", [{"peft": {"peft_type": "LORA", "r": 8}}, {"freeze": ("embed_tokens",)}], ids=str)
def test_fsdp2_with_frozen_parameters_has_the_checkpoints_of_the_estimate(changes: dict[str, Any]) -> None:
    """Those of accelerate's plugin keep no gradient of a frozen embedding's output."""
    adaptation = Adaptation(**changes)
    for framework, by_plugin in (("accelerate", True), ("trainer", False), ("trl", False)):
        of = plan("zero3", "fsdp2", activation_checkpointing="full", framework=framework)
        assert is_of_model(job(of, adaptation=adaptation)) != by_plugin
        assert not is_of_model(job(of))
    of = plan("zero3", "fsdp2", activation_checkpointing="full", framework="trainer")
    found = written(job(of, adaptation=adaptation))
    assert (found["activation_checkpointing"], found["fsdp_config"]["activation_checkpointing"]) == (True, False)


@pytest.mark.parametrize(
    ("checkpointing", "searches", "peft", "written_as"),
    [
        ("none", True, {}, None), ("full", False, {}, None), ("full", True, {}, True),
        ("full", True, {"peft_type": "LORA"}, None), ("reentrant", False, {"peft_type": "LORA"}, False),
    ],
)  # fmt: skip
def test_ddp_searches_for_unused_parameters_as_estimated(
    checkpointing: str, searches: bool, peft: dict[str, Any], written_as: bool | None
) -> None:
    """The Trainer decides by itself whether DDP searches, and always lets it search around a model of PEFT."""
    of = plan("ddp", "ddp", gpus=2, activation_checkpointing=checkpointing, framework="trainer")
    found = written(job(of, searches_unused=searches, adaptation=Adaptation(peft=peft)))
    assert found.get("ddp_find_unused_parameters") is written_as


def test_the_trainer_takes_neither_compiled_layers_nor_a_memory_budget() -> None:
    for changes, words in (({"compile": "layer"}, "layers"), ({"compile": "model", "memory_budget": 0.5}, "budget")):
        assert words in (TARGETS["trainer"].limit(job(plan("ddp", "ddp", **changes))) or "")


def test_wrap_none_disables_wrapping() -> None:
    found = written(job(plan("zero3", "fsdp2", wrap="none", framework="trainer")))["fsdp_config"]
    assert found["auto_wrap_policy"] == "NO_WRAP" and "transformer_layer_cls_to_wrap" not in found


def test_momentum_is_an_argument_of_sgd() -> None:
    found = written(job(plan("zero3", "fsdp2", optim="sgd_momentum")))
    assert (found["optim"], found["optim_args"]) == ("sgd", "momentum=0.9")
