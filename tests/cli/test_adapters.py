"""Options of adapters on command lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.cli.compare import request_of

pytestmark = pytest.mark.usefixtures("home")

JOB = ("--model", "tiny", "--gpus", "1", "--gpu", "24GiB", "--seq-len", "64")
CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@in_turn(0, of=2)
def test_a_peft_config_is_read_from_its_file(cli: Callable[..., Any], config: Path) -> None:
    job = ("estimate", *JOB, "--strategy", "ddp", "--json")
    by_file = cli(*job, "--peft-config", str(config))
    by_options = cli(*job, "--use-peft", "--lora-r", "4", "--lora-target-modules", "v_proj,q_proj")
    answers = [json.loads(ran.out) for ran in (by_file, by_options)]
    assert answers[0]["request"]["peft_config"] == json.dumps(CONFIG, sort_keys=True)
    assert answers[0]["model"]["adapters"] == {"method": "LORA", "parameters": 4 * (64 + 64) + 4 * (64 + 32)}
    assert answers[0]["estimates"] == answers[1]["estimates"]


@in_turn(1, of=2)
def test_frozen_parameters_are_given_together_or_one_by_one(cli: Callable[..., Any]) -> None:
    together = cli("estimate", *JOB, "--freeze", "embed_tokens", "norm", "--json")
    apart = cli("estimate", *JOB, "--freeze", "embed_tokens", "--freeze", "norm", "--json")
    assert json.loads(together.out)["request"]["freeze"] == ["embed_tokens", "norm"]
    assert together.out == apart.out


def test_each_side_of_a_comparison_reads_its_file(config: Path) -> None:
    request = request_of(f"--peft-config {config} --model gpt2", {})
    assert request.peft_config == json.dumps(CONFIG, sort_keys=True)


@pytest.mark.parametrize("command", ["estimate", "recommend", "check", "validate", "export torchrun"])
def test_a_missing_file_is_an_error_of_every_command(command: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    ran = cli(*command.split(), *JOB, "--peft-config", str(tmp_path / "none.json"))
    assert ran.status == 2 and "none.json cannot be read" in ran.err and "Traceback" not in ran.err
