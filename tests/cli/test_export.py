"""`export TARGET`: what it writes, where, and how it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from matrix import in_turn

from fsdp_advisor.export import TARGETS

JOB = ("--model", "meta-llama/Llama-2-7b-hf", "--gpus", "8", "--gpu", "H100-80GB")
ZERO3 = (*JOB, "--strategy", "zero3")
Cli = Callable[..., "object"]


def test_a_named_plan_is_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    ran = cli("export", "accelerate", *ZERO3, "-o", str(path))
    assert (ran.status, ran.out) == (0, "")
    config = yaml.safe_load(path.read_text())
    assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert ran.err.splitlines()[-1] == (
        "note: meta-llama/Llama-2-7b-hf: ZeRO-3 (fsdp2), 8 GPUs, bf16-mixed; "
        f"accelerate launch --config_file {path} train.py"
    )


def test_standard_output_is_the_file_alone(cli: Cli) -> None:
    ran = cli("export", "accelerate", *ZERO3, "-q")
    assert (ran.status, ran.err) == (0, "")
    assert yaml.safe_load(ran.out)["num_processes"] == 8


def test_the_recommended_plan_without_a_strategy(cli: Cli) -> None:
    ran = cli("export", "fsdp2", *JOB, "-q")
    assert ran.status == 0
    assert "PREDICTED_BYTES" in ran.out


def test_targets_are_listed_without_a_model(cli: Cli) -> None:
    ran = cli("export", "--list")
    assert ran.status == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == list(TARGETS)


def test_underscores_work_in_a_target(cli: Cli) -> None:
    assert "accelerate launch" in cli("export", "accelerate_launch", *ZERO3).out


def test_a_file_is_not_overwritten_without_force(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "it's here.yaml"
    path.write_text("mine")
    ran = cli("export", "accelerate", *ZERO3, "-o", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"fsdp-advisor: {path} exists\nhint: --force overwrites it\n"
    assert path.read_text() == "mine"
    assert cli("export", "accelerate", *ZERO3, "-o", str(path), "--force").status == 0
    assert yaml.safe_load(path.read_text())["distributed_type"] == "FSDP"


def test_a_directory_gets_every_file_of_a_launch(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran = cli("export", "deepspeed", *JOB, "--strategy", "zero3", "-o", f"{folder}/")
    assert (ran.status, ran.out) == (0, "")
    files = ["README.md", "deepspeed-launch.sh", "ds_config.json", "train.py"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert (folder / "deepspeed-launch.sh").stat().st_mode & 0o111 and not (folder / "train.py").stat().st_mode & 0o111
    assert ran.err.splitlines()[-1].endswith(f"{folder} has ds_config.json, train.py, deepspeed-launch.sh, README.md")
    again = cli("export", "deepspeed", *JOB, "--strategy", "zero3", "-o", str(folder))
    assert (again.status, again.err) == (
        2,
        f"fsdp-advisor: {folder / 'ds_config.json'} exists\nhint: --force overwrites it\n",
    )
    assert cli("export", "deepspeed", *JOB, "--strategy", "zero3", "-o", str(folder), "--force").status == 0


@in_turn(0, of=2)
def test_the_command_in_a_readme_writes_the_same_bundle(cli: Cli, tmp_path: Path) -> None:
    job = ("--model", "meta-llama/Llama-2-7b-hf", "--gpus", "4", "--gpu", "A100-40GB")
    cli("export", "accelerate", *job, "-o", f"{tmp_path}/first/")
    readme = (tmp_path / "first" / "README.md").read_text()
    (command,) = (line.strip() for line in readme.splitlines() if line.startswith("    fsdp-advisor export "))
    assert cli(*shlex.split(command.replace("DIR/", f"{tmp_path}/second/"))[1:]).status == 0
    for path in (tmp_path / "first").iterdir():
        assert (tmp_path / "second" / path.name).read_text() == path.read_text()


def test_notes_state_the_plan_of_a_file_without_comments(cli: Cli, tmp_path: Path) -> None:
    plan = ("--offload", "parameters", "--activation-checkpointing", "full", "--micro-batch-size", "20")
    ran = cli("export", "deepspeed", *ZERO3, *plan, "--allocator-conf", "expandable_segments:True")
    assert ran.status == 0
    for words in (
        "offload parameters to cpu",
        "activation checkpointing full",
        "PYTORCH_ALLOC_CONF=",
        "micro-batch 20",
        "in training",
    ):
        assert words in ran.err
    path = tmp_path / "ds.json"
    several = cli("export", "deepspeed", *ZERO3, "--nnodes", "2", "-o", str(path))
    assert several.err.splitlines()[-1].endswith(
        f"deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 4 train.py --deepspeed {path}"
    )


def test_a_missing_directory_is_refused(cli: Cli, tmp_path: Path) -> None:
    ran = cli("export", "accelerate", *ZERO3, "-o", str(tmp_path / "none" / "fsdp.yaml"))
    assert (ran.status, ran.out) == (2, "")
    assert "there is no directory" in ran.err and len(ran.err.splitlines()) == 2


def test_a_directory_is_made_with_its_parents(cli: Cli, tmp_path: Path) -> None:
    ran = cli("export", "accelerate", *ZERO3, "-o", f"{tmp_path}/a/b/")
    assert ran.status == 0 and (tmp_path / "a" / "b" / "README.md").is_file()
    (tmp_path / "file").touch()
    ran = cli("export", "accelerate", *ZERO3, "-o", f"{tmp_path}/file/b/")
    assert ran.status == 2 and f"{tmp_path / 'file'} is a file" in ran.err


def test_a_plan_that_does_not_fit_is_exported_with_a_note(cli: Cli) -> None:
    ran = cli("export", "ddp", "--model", "meta-llama/Llama-2-7b-hf", "--gpu", "24GiB", "--strategy", "ddp", "-q")
    assert ran.status == 1
    assert ran.err == "note: DDP does not fit 24GiB\n"
    assert "it does not fit" in ran.out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("fsdp2", *JOB, "--strategy", "zero1"), 2, "fsdp2 cannot do ZeRO-1 (deepspeed): it trains only with FSDP2"),
        (("accelerate", *JOB, "--strategy", "zero1", "--backend", "fsdp2"), 2, "backend fsdp2 has no strategy zero1"),
        (("deepspeed", *JOB, "--strategy", "ddp"), 2, "deepspeed cannot do DDP: it shards only with DeepSpeed"),
        (
            ("fsdp2", "--model", "7B", "--strategy", "zero3"),
            2,
            "fsdp2 cannot do ZeRO-3 (fsdp2): a bare parameter count",
        ),
        (("acelerate", *ZERO3), 2, "unknown export target 'acelerate'"),
        (("accelerate", "--model", "./no/such-model"), 2, "unknown model"),
        (
            ("axolotl", "--model", "openai/whisper-tiny", "--gpus", "2"),
            2,
            "axolotl supports none of the possible plans: it trains only causal language models",
        ),
        ((), 2, "TARGET is missing"),
        (JOB, 2, "TARGET is missing"),
        (("accelerate", "--gpus", "2"), 2, "model is missing"),
        (("ddp", *JOB[:2], "--gpu", "A100-40GB"), 1, "no plan that ddp supports fits A100-40GB"),
    ],
)
def test_refusals_are_one_or_two_lines(arguments: tuple[str, ...], status: int, message: str, cli: Cli) -> None:
    ran = cli("export", *arguments, "-q")
    assert (ran.status, ran.out) == (status, "")
    first, *hint = ran.err.splitlines()
    assert first.startswith(f"fsdp-advisor: {message}"), ran.err
    assert len(hint) <= 1 and all(line.startswith("hint: ") for line in hint)
