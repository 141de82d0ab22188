"""Exports of wrap policies make the units that were estimated."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from export_jobs import job, plan

from fsdp_advisor.export import export

torch = pytest.importorskip("torch")

from torch.distributed.fsdp import FSDPModule  # after the check for torch
from torch.distributed.fsdp._fully_shard._fully_shard import _get_module_fsdp_state
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_advisor.recording.wrapping import modules_by_size
from fsdp_advisor.validation.engines import fake_process_group

pytestmark = pytest.mark.slow

TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def text_of(target: str, **changes: Any) -> str:
    of = plan("zero3", changes.pop("backend", "fsdp2"), **changes)
    return export(target, job(of)).text


def units_of_script(wrap: str) -> list[list[str]]:
    """The names of the modules of each unit that the script makes of a small model, in a process group of 8 ranks."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text_of("fsdp2", wrap=wrap), "train.py", "exec"), names)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    with fake_process_group(8):
        names["shard"](model, torch.device("cpu"))
        units: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                units.setdefault(id(_get_module_fsdp_state(module)), []).append(name)
    return list(units.values())


def test_the_script_makes_groups_of_layers() -> None:
    layers = [f"model.layers.{i}" for i in range(5)]
    assert units_of_script("every:2") == [[""], layers[:2], layers[2:4], layers[4:]]


def test_the_script_selects_modules_by_size_as_pytorch_does() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    names = {module: name for name, module in model.named_modules()}
    selected = [[names[module]] for module in modules_by_size(model, 30_000)]
    assert ["model.layers.0.mlp"] in selected
    assert sorted(units_of_script("size:30000")) == sorted([[""], *selected])


def test_configurations_name_the_size() -> None:
    size = {"backend": "fsdp1", "wrap": "size:2000000"}
    accelerate = yaml.safe_load(text_of("accelerate", framework="accelerate", **size))["fsdp_config"]
    assert (accelerate["fsdp_auto_wrap_policy"], accelerate["fsdp_min_num_params"]) == ("SIZE_BASED_WRAP", 2_000_000)
    names: dict[str, Any] = {}
    exec(compile(text_of("trainer", framework="trainer", **size), "arguments.py", "exec"), names)
    plugin = names["training_arguments"](output_dir="unused", use_cpu=True).fsdp_config
    assert plugin["min_num_params"] == 2_000_000


def test_configurations_name_the_classes() -> None:
    text = text_of("accelerate", wrap="class:LlamaDecoderLayer", framework="accelerate")
    values = yaml.safe_load(text)["fsdp_config"]
    assert values["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert values["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
