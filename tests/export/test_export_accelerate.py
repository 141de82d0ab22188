"""accelerate's own loader, launcher and plugins read every configuration."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from export_jobs import HIDDEN, job, jobs, plan
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from fsdp_advisor.export import Job, export, find
from fsdp_advisor.export.bundle import bundle
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.export.model_arguments import model_arguments
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan

SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")
SHARDING = {
    "zero2": ShardingStrategy.SHARD_GRAD_OP, "zero3": ShardingStrategy.FULL_SHARD, "hsdp": ShardingStrategy.HYBRID_SHARD,
}  # fmt: skip
PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@functools.cache
def parser() -> argparse.ArgumentParser:
    return launch.launch_command_parser()


@pytest.fixture(autouse=True)
def _gpu_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, with a fake GPU and every port free. Restores the environment afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with mock.patch.dict(os.environ):
        yield


def launched(of: Job) -> tuple[ClusterConfig, dict[str, Any], dict[str, str]]:
    """The configuration as accelerate loads it, the parsed file, and the environment its launcher passes to the ranks."""
    text = export("accelerate", of).text
    Path("accelerate.yaml").write_text(text)
    loaded = load_config_from_file("accelerate.yaml")
    args, defaults, precision_given = launch._validate_launch_command(
        parser().parse_args(["--config_file", "accelerate.yaml", "train.py"])
    )
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config) + (["mixed_precision"] if precision_given else [])
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return loaded, yaml.safe_load(text), prepare_deepspeed_cmd_env(args)[1]
    return loaded, yaml.safe_load(text), prepare_multi_gpu_env(args)


def test_accelerate_reads_every_key_of_every_configuration() -> None:
    options = {action.dest for action in parser()._actions}
    for each in jobs("accelerate"):
        loaded, written, environment = launched(each)
        for section in SECTIONS:
            assert set(written.get(section, {})) <= options
        assert (loaded.num_processes, loaded.num_machines) == (each.plan.world_size, each.plan.nnodes)
        assert environment["ACCELERATE_MIXED_PRECISION"] == (
            {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}.get(each.plan.precision, "no")
            if "mixed_precision" in written
            else "no"
        )


@pytest.mark.parametrize("of", [plan("ddp", "ddp"), plan("zero3", "fsdp2")], ids=str)
def test_ranks_compile_the_model_as_planned(of: Plan) -> None:
    found = {}
    for compiles in ("model", "layer", "none"):
        environment = launched(job(replace(of, compile=compiles, framework="accelerate")))[2]
        with mock.patch.dict(os.environ, environment):
            plugin = TorchDynamoPlugin()
        found[compiles] = (plugin.backend.name, plugin.mode, plugin.use_regional_compilation)
    assert found == {
        "model": ("INDUCTOR", "default", False), "layer": ("INDUCTOR", "default", True), "none": ("NO", "default", False),
    }  # fmt: skip


def test_values_are_among_the_choices_of_the_launcher() -> None:
    choices = {action.dest: action.choices for action in parser()._actions if action.choices}
    checked = set()
    for each in jobs("accelerate"):
        written = yaml.safe_load(export("accelerate", each).text)
        for section in SECTIONS:
            for key, value in written.get(section, {}).items():
                if key in choices and not isinstance(value, bool):
                    assert str(value) in map(str, choices[key]), key
                    checked.add(key)
    assert checked >= {"fsdp_version", "zero_stage", "offload_optimizer_device"} & set(choices)


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_fsdp_plugin_of_each_rank_matches_the_plan(backend: str) -> None:
    for each in (j for j in jobs("accelerate") if j.plan.backend == backend):
        p = each.plan
        environment = launched(each)[2]
        with mock.patch.dict(os.environ, environment):
            plugin = FullyShardedDataParallelPlugin()
            replicas = ParallelismConfig() if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in environment else None
        assert plugin.fsdp_version == int(backend[-1])
        assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
        assert plugin.activation_checkpointing == (p.activation_checkpointing == "full")
        assert plugin.state_dict_type.name == f"{p.saves_as.upper()}_STATE_DICT"
        if backend == "fsdp2":
            assert plugin.reshard_after_forward is (p.strategy in ("zero3", "hsdp"))
            assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") == (p.offload == "parameters")
            assert (replicas is not None) == (p.strategy == "hsdp" and p.replica_degree > 1)
            if replicas is not None:
                assert (replicas.dp_replicate_size, replicas.dp_shard_size) == (p.replica_degree, p.shard_degree)
        else:
            assert plugin.sharding_strategy == SHARDING[p.strategy]
            assert plugin.cpu_offload.offload_params == (p.offload == "parameters")
            assert plugin.backward_prefetch == PREFETCH[p.backward_prefetch]
            assert plugin.use_orig_params == p.use_orig_params and plugin.sync_module_states


def test_flat_parameters_are_made_before_the_optimizer_that_steps_them() -> None:
    of = job(plan("zero3", "fsdp1", framework="accelerate", use_orig_params=False))
    with mock.patch.dict(os.environ, launched(of)[2]):
        assert FullyShardedDataParallelPlugin().use_orig_params is False
    script = next(file.text for file in bundle(find("accelerate"), of).files if file.name == "train.py")
    assert script.index("accelerator.prepare(model)") < script.index("torch.optim.AdamW(")
    assert "optimizer, loader = accelerator.prepare(optimizer, loader)" in script


def test_deepspeed_plugin_of_each_rank_matches_the_plan() -> None:
    for each in (j for j in jobs("accelerate") if j.plan.backend == "deepspeed"):
        p = each.plan
        Path("ds_config.json").write_text(export("deepspeed", each).text)
        with mock.patch.dict(os.environ, launched(each)[2]):
            plugin = DeepSpeedPlugin()
            plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
        config = plugin.deepspeed_config
        assert config["gradient_accumulation_steps"] == p.gradient_accumulation_steps
        assert config["zero_optimization"]["stage"] == int(p.strategy[-1])
        assert plugin.zero3_init_flag == (p.strategy == "zero3")
        assert bool(config.get("bf16", {}).get("enabled")) == p.precision.startswith("bf16")
        assert bool(config.get("fp16", {}).get("enabled")) == p.precision.startswith("fp16")
        place = p.offload_device if p.offload != "none" else "none"
        assert config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") == place
        shards = p.offload_device if p.offload == "parameters" else "none"
        assert config["zero_optimization"].get("offload_param", {}).get("device", "none") == shards
        if p.uses_accelerate:  # the value that accelerate fills in for "auto"
            assert config["zero_optimization"]["reduce_bucket_size"] == HIDDEN**2
        if place == "nvme":
            assert config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/local_nvme"


def test_wrap_none_disables_wrapping() -> None:
    environment = launched(job(plan("zero3", "fsdp2", wrap="none", framework="accelerate")))[2]
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in environment or environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] in (
        "",
        "None",
    )


@pytest.mark.parametrize("framework", ["torch", "accelerate"])
def test_deepspeed_file_is_used_if_bucket_sizes_are_not_its_defaults(framework: str) -> None:
    exported = export("accelerate", job(plan("zero3", "deepspeed", framework=framework)))
    section = yaml.safe_load(exported.text)["deepspeed_config"]
    assert ("deepspeed_config_file" in section) == (framework == "accelerate")
    assert any("export deepspeed" in note for note in exported.notes) == (framework == "accelerate")


def test_companion_command_names_every_option_of_the_plan() -> None:
    """The command is read by the command line's own parser and gives the plan of the configuration."""
    asked = make_request(
        {
            "model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB", "strategy": "zero3", "backend": "deepspeed",
            "offload": "parameters", "micro_batch_size": 2, "gradient_accumulation_steps": 4, "seq_len": 1024,
            "activation_checkpointing": "full", "allocator_conf": "expandable_segments:True",
        }
    )  # fmt: skip
    report = report_for("accelerate", asked)
    exported = export("accelerate", Job.of(report, report.estimates[0]))
    (note,) = (note for note in exported.notes if "ds_config.json: " in note)
    program, command, target, *options = shlex.split(note.partition("ds_config.json: ")[2])
    assert (program, command, target) == ("fsdp-advisor", "export", "deepspeed")
    assert options[-2:] == ["-o", "ds_config.json"]
    names = [word.removeprefix("--") for word in options[:-2:2]]
    again = report_for(
        "deepspeed", make_request(dict(zip([n.replace("-", "_") for n in names], options[1:-2:2], strict=True)))
    )
    assert again.estimates[0].plan == report.estimates[0].plan
    assert again.request.allocator_conf == "expandable_segments:True"


def test_file_for_several_nodes_names_the_head_node() -> None:
    loaded, _, _ = launched(job(plan("zero3", "fsdp2", 2)))
    assert (loaded.main_process_ip, loaded.main_process_port, loaded.num_machines) == ("HEAD_NODE", 29500, 2)


def test_one_gpu_is_not_distributed() -> None:
    assert launched(job(plan("ddp", "ddp", gpus=1)))[0].distributed_type.value == "NO"


@pytest.mark.parametrize(
    ("backend", "storage", "expected"),
    [
        ("fsdp2", "bfloat16", {"": "cpu"}),
        ("fsdp2", "uint8", None),
        ("fsdp1", "bfloat16", {"": "cpu"}),
        ("ddp", "bfloat16", None),
    ],
)
def test_a_base_that_fsdp_shards_is_loaded_on_the_host(
    backend: str, storage: str, expected: dict[str, str] | None
) -> None:
    """transformers puts it whole on each GPU otherwise. FSDP2 would leave weights in uint8 on the host."""
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_storage": storage}
    quantized = Adaptation(peft={"peft_type": "LORA"}, quantization=quantization)
    of = job(plan("ddp" if backend == "ddp" else "zero3", backend), adaptation=quantized)
    assert model_arguments(of).get("device_map") == expected
