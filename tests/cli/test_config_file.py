"""--config-file, `compare` and `check` on the command line, and the same files over REST and from Python."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from matrix import in_turn, of_today

from fsdp_advisor import estimate

Cli = Callable[..., Any]
LLAMA = "meta-llama/Llama-2-7b-hf"
TEXT = f"""
base_model: {LLAMA}
micro_batch_size: 2
gradient_accumulation_steps: 2
sequence_len: 1024
bf16: true
relora: true
wandb_project: mine
fsdp_version: 2
dp_shard_size: 8
fsdp_config: {{reshard_after_forward: true, activation_checkpointing: true}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "axolotl.yaml"
    path.write_text(TEXT)
    return path


def test_estimate_lists_what_was_read_ignored_and_not_modelled(cli: Cli, config: Path) -> None:
    ran = cli("estimate", "--config-file", str(config), "--gpu", "A100-40GB", "-q", columns=300)
    assert (ran.status, ran.err) == (0, "")
    first, read, missing, assumed, ignored, *rest = ran.out.splitlines()
    assert first == f"{config} (axolotl)"
    assert read.startswith("  read: ") and "micro_batch_size: 2" in read
    assert missing == "  not modelled: relora: True (LoRA restarts)"
    assert "8 GPUs, the size of the mesh" in assumed and ignored == "  ignored: wandb_project"
    assert any("micro-batch 2, 1024 tokens" in line for line in rest)


def test_every_interface_reads_the_same_job(cli: Cli, config: Path, client: TestClient) -> None:
    document = json.loads(cli("estimate", "--config-file", str(config), "--gpu", "A100-40GB", "--json", "-q").out)
    by_python = estimate(config_file=str(config), gpu="A100-40GB").as_dict()
    posted = {"gpu": "A100-40GB", "config_file": [{"name": str(config), "text": TEXT}]}
    by_rest = client.post("/api/v1/estimate", json=posted).json()
    assert document == json.loads(json.dumps(by_python)) == by_rest
    assert document["request"]["framework"] == "axolotl" and document["estimates"][0]["strategy"] == "zero3"
    assert document["config_files"][0]["not_modelled"] == ["relora: True (LoRA restarts)"]


def test_options_win_over_the_file(cli: Cli, config: Path) -> None:
    ran = cli(
        "estimate",
        "--config-file",
        str(config),
        "--micro-batch-size",
        "1",
        "--gpus",
        "4",
        "--gpu",
        "A100-40GB",
        "--json",
    )
    request = json.loads(ran.out)["request"]
    assert (request["micro_batch_size"], request["gpus"], request["seq_len"]) == (1, 4, 1024)


@in_turn(1, of=6)
def test_recommend_searches_with_the_global_batch_of_the_file(cli: Cli, config: Path) -> None:
    ran = cli("recommend", "--config-file", str(config), "--gpu", "A100-40GB", "-q", columns=300)
    assert ran.status == 0
    assert "the files' global batch size 32 is kept" in " ".join(ran.out.split())
    (batches,) = re.findall(
        r"Recommended: .* micro-batch (\d+), (?:accumulation (\d+)|no accumulation), global batch 32", ran.out
    )
    assert int(batches[0]) * int(batches[1] or 1) * 8 == 32


def test_export_takes_a_file_and_writes_another_format(cli: Cli, config: Path, tmp_path: Path) -> None:
    ran = cli(
        "export", "accelerate", "--config-file", str(config), "--gpu", "A100-40GB", "-o", str(tmp_path / "a.yaml")
    )
    assert ran.status == 0
    assert "fsdp_activation_checkpointing: true" in (tmp_path / "a.yaml").read_text()
    assert "relora: True (LoRA restarts)" in ran.err


@pytest.mark.parametrize(("gpu", "status", "verdict"), [("A100-40GB", 0, "fits"), ("16GiB", 1, "does not fit")])
def test_check_prints_one_line_and_exits_with_the_verdict(
    gpu: str, status: int, verdict: str, cli: Cli, config: Path
) -> None:
    ran = cli("check", "--config-file", str(config), "--gpu", gpu)
    assert ran.status == status
    (line,) = ran.out.splitlines()
    assert line.startswith(f"{verdict}: {LLAMA}, ZeRO-3 (fsdp2), 8 x {gpu}, micro-batch 2, 1024 tokens: needs ")
    assert line.endswith("not modelled: relora: True (LoRA restarts)")
    document = json.loads(cli("check", "--config-file", str(config), "--gpu", gpu, "--json").out)
    assert document["fits"] is (status == 0) and document["line"] == line


@in_turn(0, of=2)
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            f"torchrun --nproc_per_node 2 run_clm.py --model_name_or_path {LLAMA} --block_size 512 --fsdp full_shard",
            f"{LLAMA}, ZeRO-3 (",
        ),
        (f"base_model: {LLAMA}\nmicro_batch_size: 1\nsequence_len: 512\n", f"{LLAMA}, DDP ("),
        (
            '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\nlocal_batch_size = 1\n',
            "meta-llama/Llama-3.1-8B, DDP (",
        ),
    ],
)
def test_a_command_or_a_file_is_read_from_a_pipe(
    text: str, found: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    ran = cli("check", "--config-file", "-", "--gpu", "H100")
    assert found in ran.out and ", 512 tokens: " in ran.out


@pytest.mark.parametrize(
    ("model", "left_out"),
    of_today(
        [
            ("Qwen/Qwen2.5-VL-7B-Instruct", "is estimated for training on text only"),
            ("google/gemma-3-27b-it", "is estimated as its language model alone"),
        ],
        days=2,
    ),
)
def test_check_says_which_part_of_a_model_it_leaves_out(model: str, left_out: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{{base_model: {model}, micro_batch_size: 1}}")
    options = ("--config-file", str(tmp_path / "a.yaml"), "--gpu", "B200", "--strategy", "ddp")
    ran = cli("check", *options)
    assert len(ran.out.splitlines()) == 1 and left_out in ran.err
    assert set(ran.err.splitlines()) >= set(cli("estimate", *options).err.splitlines())
    assert any(left_out in note for note in json.loads(cli("check", *options, "--json").out)["notes"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red", "is of no known format"),
        ("{base_model: nobody/nothing, micro_batch_size: 1}", "nobody/nothing is not in the catalog"),
        (f"{{base_model: {LLAMA}, deepspeed: ds.json}}", "names ds.json, which was not found"),
        ("{micro_batch_size: 1, base_model: m, sequence_len: [1]}", "sequence_len is [1], not a whole number"),
    ],
)
def test_check_exits_with_2_for_errors(
    text: str, message: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.yaml").write_text(text)
    ran = cli("check", "--config-file", str(tmp_path / "a.yaml"), "--gpu", "H100")
    assert (ran.status, ran.out) == (2, "") and message in ran.err and len(ran.err.splitlines()) <= 2


@pytest.mark.parametrize("command", ["estimate", "recommend", "check"])
def test_a_file_that_a_configuration_names_is_not_assumed(command: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{{base_model: {LLAMA}, deepspeed: ds.json}}")
    ran = cli(command, "--config-file", str(tmp_path / "a.yaml"), "--gpu", "H100")
    assert (ran.status, ran.out) == (2, "") and "names ds.json, which was not found" in ran.err


def test_check_gives_the_same_answer_to_get_and_post(client: TestClient) -> None:
    posted = {"gpu": "16GiB", "config_file": [{"name": "axolotl.yaml", "text": TEXT}]}
    found = client.post("/api/v1/check", json=posted).json()
    assert found["fits"] is False and found["line"].startswith("does not fit: ")
    job = {"model": LLAMA, "gpus": 8, "gpu": "H100", "strategy": "zero3"}
    assert client.get("/api/v1/check", params=job).json() == client.post("/api/v1/check", json=job).json()


@pytest.mark.parametrize(
    "files",
    [
        [{"name": "a.yaml", "text": "x: 1"}],
        [{"name": "a.yaml"}],
        "a.yaml",
        [{"name": "/etc/passwd", "text": ""}],
        [{"name": "a.yaml", "text": "a: &a [x]\nb: &b [*a,*a]\nbase_model: [*b,*b]"}],
        [{"name": "a.py", "text": "(" * 5000}],
        [{"name": "a.json", "text": "[" * 60000}],
        [{"name": "a.yaml", "text": "base_model: m\nsequence_len: 1e999"}],
        [{"name": "ds.json", "text": '{"zero_optimization": {"stage": 3, "reduce_bucket_size": "many"}}'}],
    ],
)
def test_hostile_files_are_refused_over_rest(files: Any, client: TestClient) -> None:
    got = client.post("/api/v1/estimate", json={"model": "7B", "config_file": files})
    assert got.status_code in (404, 422) and set(got.json()) == {"error", "hint", "status"}, got.text


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "hint: give --model"),
        ("run.sh", "python -m my.trainer.main data.max_prompt_length=512", "not read: data.max_prompt_length"),
    ],
)
def test_a_file_without_a_model_is_named(name: str, text: str, hint: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    ran = cli("estimate", "--config-file", str(tmp_path / name))
    assert (ran.status, ran.out) == (2, "")
    assert f"{name} names no model" in ran.err and hint in ran.err


def test_compare_takes_files_and_options(cli: Cli, config: Path) -> None:
    ran = cli("compare", str(config), f"{config} --micro-batch-size 256", "--gpu", "A100-40GB", "-q", columns=200)
    assert ran.status == 1
    assert "A fits A100-40GB" in ran.out and "B fits with A's --micro-batch-size." in ran.out
    assert "* micro batch size" in ran.out and "--micro-batch-size 2 -> 256: " in ran.out
    sets = cli(
        "compare", "--gpu H100", "--gpu 24GiB", "--model", LLAMA, "--gpus", "8", "--strategy", "zero3", "--json", "-q"
    )
    document = json.loads(sets.out)
    assert document["differences"][0]["options"] == {"gpu": {"a": "H100-80GB", "b": "24GiB"}}


@pytest.mark.parametrize("columns", [60, 100])
def test_compare_keeps_to_the_width_and_leaves_out_what_neither_job_has(columns: int, cli: Cli) -> None:
    ran = cli("compare", "--gpu H100", "--gpu A100", "--model", LLAMA, "--gpus", "8", "-q", columns=columns)
    assert max(map(len, ran.out.splitlines())) <= columns
    assert "(6.74B" in ran.out and "* gpu" in ran.out
    assert not any(name in ran.out for name in ("optim args", "allocator conf", "host per node"))


def test_compare_over_rest_equals_the_command_line(cli: Cli, client: TestClient) -> None:
    job = {"model": LLAMA, "gpus": 8, "strategy": "zero3"}
    got = client.post("/api/v1/compare", json={"a": job | {"gpu": "H100"}, "b": job | {"gpu": "24GiB"}}).json()
    words = ("--model", LLAMA, "--gpus", "8", "--strategy", "zero3")
    assert got == json.loads(cli("compare", "--gpu H100", "--gpu 24GiB", *words, "--json", "-q").out)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("nothing.yaml", "--gpu H100", "cannot read nothing.yaml"),
        ("meta-llama/Llama-3.1-8B", "--gpu H100", "compare '--model gpt2' '--model gpt2-xl'"),
        ("examples/accelerate_configs/deepspeed_zero3.yaml", "--gpu H100", "trl sft --accelerate_config zero3"),
        ("--gpu 'H100", "--gpu H100", "No closing quotation"),
        ("--gpuu H100", "--gpu H100", "no such option: --gpuu"),
    ],
)
def test_compare_refuses_what_is_neither_file_nor_options(a: str, b: str, message: str, cli: Cli) -> None:
    ran = cli("compare", a, b, "--model", "7B")
    assert (ran.status, ran.out) == (2, "") and message in ran.err
    assert cli("compare", a).status == 2


def test_a_hint_about_a_file_names_its_keys(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump({"base_model": "gpt2", "attn_implementation": "flash_attention_2", "sequence_len": 128})
    )
    ran = cli("estimate", "--config-file", str(file), "--precision", "fp32")
    assert ran.status == 2
    assert ran.err.endswith("(in job.yaml: --attention is attn_implementation, --precision is bf16 or fp16)\n")
