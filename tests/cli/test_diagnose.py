"""`diagnose` on the command line. tests/diagnosis tests the diagnoses themselves."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_advisor
from fsdp_advisor.comparison import UNSHARDED

DATA = Path(__file__).parents[1] / "diagnosis" / "data"


def path_of(name: str) -> Path:
    return DATA / f"{name}.pickle.gz"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_text_keeps_to_the_width(columns: int, cli: Callable[..., Any]) -> None:
    ran = cli("diagnose", str(path_of("loss_oom")), columns=columns)
    assert ran.status == 0 and not ran.err
    first = next(i for i, line in enumerate(ran.out.splitlines()) if line.startswith("Moment"))
    assert max(map(len, ran.out.splitlines()[first + 3 :])) <= columns
    assert "activations" in ran.out and "micro-batch" in ran.out


def test_json_of_the_command_line_equals_python(cli: Callable[..., Any]) -> None:
    ran = cli("diagnose", str(path_of("fsdp2_forward_oom")), "--json")
    assert ran.status == 0
    assert json.loads(ran.out) == fsdp_advisor.diagnose(path_of("fsdp2_forward_oom")).as_dict()


def test_a_job_on_the_command_line_is_compared(cli: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("model_name_or_path: openai-community/gpt2\nper_device_train_batch_size: 1\nbf16: true\n")
    options = (
        "--config-file",
        str(config),
        "--gpus",
        "4",
        "--gpu",
        "A100-40GB",
        "--strategy",
        "zero3",
        "--seq-len",
        "1024",
    )
    ran = cli("diagnose", str(path_of("gpt2")), *options)
    assert ran.status == 0 and "Estimate of the job: openai-community/gpt2, ZeRO-3" in ran.out


def test_a_job_whose_files_name_no_strategy_is_compared_as_ddp(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        'args = TrainingArguments(per_device_train_batch_size=1, bf16=True)\nmodel = AutoModelForCausalLM.from_pretrained("gpt2")\n'
        "Trainer(model=model, args=args).train()\n"
    )
    job = ("--config-file", str(script), "--gpus", "4", "--gpu", "A100-40GB")
    ran = cli("diagnose", str(path_of("loss_oom")), *job)
    assert ran.status == 0 and "Estimate of the job: openai-community/gpt2, DDP (ddp), 4 x A100-40GB" in ran.out
    assert UNSHARDED in json.loads(cli("diagnose", str(path_of("loss_oom")), *job, "--json").out)["notes"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(script.read_text()))
    piped = cli("diagnose", str(path_of("loss_oom")), "--config-file", "-", *job[2:], "--json")
    assert UNSHARDED in json.loads(piped.out)["notes"]


def test_standard_input_is_read(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        buffer = io.BytesIO(path_of("loss_oom").read_bytes())

    monkeypatch.setattr(sys, "stdin", Pipe)
    ran = cli("diagnose", "-")
    assert ran.status == 0 and "out of memory on GPU 0" in ran.out


def test_bad_files_end_with_status_2_and_a_hint(cli: Callable[..., Any], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for arguments in ((str(empty),), (str(tmp_path / "missing"),), ()):
        ran = cli("diagnose", *arguments)
        assert ran.status == 2 and not ran.out and "hint:" in ran.err


def test_the_help_does_not_ask_for_a_model(cli: Callable[..., Any]) -> None:
    assert "[required]" not in cli("diagnose", "--help").out
    assert "[required]" in cli("estimate", "--help").out
