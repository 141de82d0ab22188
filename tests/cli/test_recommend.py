"""`recommend`: whole outputs, what it writes where, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

from fsdp_advisor import estimate

pytestmark = pytest.mark.slow

LLAMA = ("--model", "meta-llama/Llama-2-7b-hf", "--gpus", "4", "--gpu", "A100-40GB")
GPT2 = ("--model", "openai-community/gpt2", "--gpus", "2", "--gpu", "24GiB")
"""Searched in a fifth of the time."""
TOO_LARGE = ("--model", "meta-llama/Llama-2-70b-hf", "--gpus", "2", "--gpu", "24GiB", "--offload", "none")

CASES: dict[str, tuple[tuple[str, ...], int, int]] = {
    # file: (arguments after `recommend`, columns, exit status)
    "recommend_llama2.txt": ((*LLAMA, "--tokens", "10e9", "--price", "2"), 120, 0),
    "recommend_llama2_60.txt": (LLAMA, 60, 0),
    "recommend_llama2.md": (LLAMA, 120, 0),
    "recommend_find_batch.txt": ((*LLAMA, "--find", "batch"), 120, 0),
    "recommend_find_gpus_60.txt": (("--model", "Qwen/Qwen2.5-32B", "--gpu", "H100-80GB", "--find", "gpus"), 60, 0),
    "recommend_nothing_fits.txt": (TOO_LARGE, 120, 1),
    "recommend_count.txt": (("--model", "7e9", "--gpus", "4", "--gpu", "H100"), 120, 1),
}

Cli = Callable[..., Any]


USUAL = ("recommend_llama2.txt", "recommend_llama2_60.txt", "recommend_find_batch.txt", "recommend_count.txt")


@pytest.mark.parametrize("name", taken(USUAL, [name for name in CASES if name not in USUAL], days=2))
def test_a_recommendation_equals_its_golden_file(name: str, cli: Cli, golden: Callable[[str, str], None]) -> None:
    arguments, columns, status = CASES[name]
    form = ("--format", "markdown") if name.endswith(".md") else ()
    ran = cli("recommend", *arguments, *form, "-q", columns=columns)
    assert ran.err == ""
    golden(name, ran.out)
    assert ran.status == status
    assert form or longest_line(ran.out) <= columns


def longest_line(out: str) -> int:
    """Characters of the longest line, commands apart: they are there to be copied."""
    shown, *commands = re.split("To (?:try|launch) it\n", out)
    others = [line for line in "".join(commands).splitlines() if not line.startswith("  ")]
    return max(map(len, [*shown.splitlines(), *others]))


def test_json_is_the_estimates_with_the_recommendation(cli: Cli) -> None:
    plain = estimate(model=LLAMA[1], gpus=int(LLAMA[3]), gpu=LLAMA[5])
    document = json.loads(cli("recommend", *LLAMA, "--json").out)
    assert document["estimates"] == plain.as_dict()["estimates"]
    assert document["recommendation"]["strategy"] == "zero3"
    assert document["recommendation"]["peak_reserved_bytes"] < document["recommendation"]["peak_device_bytes"]
    assert document["recommendation"]["peak_device_bytes"] <= document["gpu"]["memory_bytes"]
    assert [step["answer"] for step in document["recommendation"]["path"][:2]] == ["no", "states"]


def test_what_it_prints_to_launch_works(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = cli("recommend", *LLAMA).out
    line = re.search(r"^  fsdp-advisor (export .*)$", out, re.MULTILINE)
    assert line is not None
    monkeypatch.chdir(tmp_path)
    assert cli(*line[1].split()).status == 0
    (start,) = re.findall(r"^  bash (run/\S+)$", out, re.MULTILINE)
    assert (tmp_path / start).stat().st_mode & 0o111
    text = (tmp_path / "run" / "train.py").read_text()
    assert text.startswith("# meta-llama/Llama-2-7b-hf: ZeRO-3 (fsdp2)")
    shown = re.search(r"^  needs (\d+\.\d\d GiB)", out, re.MULTILINE)
    assert shown is not None
    assert f"Predicted peak per GPU: {shown[1]} of the device's memory" in text


@in_turn(1, of=2)
def test_the_launch_line_is_of_what_was_estimated(cli: Cli) -> None:
    out = cli("recommend", *GPT2, "--framework", "accelerate").out
    assert "  fsdp-advisor export accelerate " in out
    assert "--framework accelerate" in out


def test_of_a_bare_count_nothing_is_promised(cli: Cli) -> None:
    """No strategy is known to fit: the same status from both commands."""
    count = ("--model", "13B", "--gpus", "8", "--gpu", "H100")
    ran = cli("recommend", *count, "-q", columns=200)
    assert (ran.status, cli("estimate", *count).status) == (1, 1)
    assert "\nBy its states alone: ZeRO-2 (fsdp2)\n" in ran.out
    assert "The peak is unknown" in ran.out
    assert "Give --model a name" in " ".join(ran.out.split())
    assert "Recommended" not in ran.out
    assert "To launch it" not in ran.out
    too_large = cli("recommend", "--model", "13B", "--gpus", "1", "--gpu", "H100", "--offload", "none", "-q")
    assert (too_large.status, cli("estimate", "--model", "13B", "--gpu", "24GiB", "--strategy", "ddp").status) == (1, 1)
    assert "it may fit on 3 x H100-80GB" in too_large.out
    assert "it fits on" not in too_large.out


@in_turn(0, of=3)
def test_an_unusual_host_is_said_once(cli: Cli) -> None:
    one_plan = (
        "--strategy",
        "zero3",
        "--backend",
        "fsdp2",
        "--activation-checkpointing",
        "full",
        "--micro-batch-size",
        "1",
    )
    large = (
        "--model",
        "Qwen/Qwen2.5-32B",
        "--gpus",
        "8",
        "--gpu",
        "T4",
        "--offload",
        "parameters",
        "--seq-len",
        "1024",
        *one_plan,
    )
    ran = cli("recommend", *large, columns=200)
    assert ran.out.count("and nodes usually have 384.00 GiB or less: give --host-memory to check it") == 1
    assert "--host-memory" not in ran.err
    assert "nodes usually have 384.00 GiB or less" in cli("recommend", *large, "--json").err


@in_turn(0, of=2)
def test_underscores_and_help(cli: Cli) -> None:
    assert cli("recommend", *GPT2, "--global_batch_size", "64", "--json").status == 0
    shown = cli("recommend", "--help").out
    for option in ("--find NAME", "gpus, batch, sequence", "--margin", "--global-batch-size N", "--tokens"):
        assert option in shown
    assert "[default: searched]" in shown
    assert "--find" not in cli("estimate", "--help").out


@in_turn(0, of=2)
def test_the_plot_is_svg(cli: Cli, tmp_path: Path) -> None:
    plot = tmp_path / "frontier.svg"
    assert cli("recommend", *GPT2, "--find", "batch", "--plot", str(plot), "-q").status == 0
    assert plot.read_text().startswith("<svg")
    again = cli("recommend", *GPT2, "--plot", str(plot), "-q")
    assert (again.status, again.err.splitlines()[0]) == (2, f"fsdp-advisor: {plot} exists")
    assert cli("recommend", *GPT2, "--plot", str(plot), "--force", "-q").status == 0


def test_ascii_where_the_screen_takes_no_more(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_advisor.cli import output

    monkeypatch.setattr(output, "_takes_unicode", lambda: False)
    assert cli("recommend", *GPT2, "-q").out.isascii()


@in_turn(1, of=3)
def test_notes_go_to_standard_error(cli: Cli) -> None:
    one_strategy = ("--strategy", "zero3", "--backend", "fsdp2", "--activation-checkpointing", "full")
    ran = cli("recommend", "--model", "openai-community/gpt2", "--gpus", "2", "--find", "gpu-type", *one_strategy)
    assert "note: offload was not searched: give --host-memory or --offload" in ran.err
    assert "offload was not searched" not in ran.out


@in_turn(5, of=6)
def test_a_sweep_over_gpu_types_has_time_and_gpu_hours_and_only_gpus_that_fit(cli: Cli) -> None:
    one_strategy = ("--strategy", "zero3", "--backend", "fsdp2", "--activation-checkpointing", "full")
    job = ("--model", "Qwen/Qwen2.5-3B", "--gpus", "2", *one_strategy, "--micro-batch-size", "1")
    out = cli("recommend", *job, "--find", "gpu-type", "--tokens", "1e9", "-q").out
    table = out[out.index("Found (GPU)") :].split("\n\n")[0]
    assert "GPU hours" in table and " days" in table and "does not fit" not in table
    assert re.search(r"\n\d+ other GPUs are too small; --json lists them\.\n", out)
    lines = table.splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("GPU ")) + 1 :]
    assert rows[0].startswith("RTX-5090 ") and " 30.81* " in rows[0]
    assert rows[-1] == "* with the allocator's cache; 28.86 GiB are enough with less cache."
    markdown = cli("recommend", *job, "--find", "gpu-type", "--tokens", "1e9", "-q", "--format", "markdown").out
    assert "GPU hours" in markdown and "does not fit" not in markdown
    assert re.search(r"\n\d+ other GPUs are too small; --json lists them\.\n", markdown)


BAD: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a batch that cannot be divided": (
        ("--gpus", "8", "--micro-batch-size", "2", "--gradient-accumulation-steps", "4", "--global-batch-size", "128"),
        "micro-batch 2 x accumulation 4 x world 8 = 64, not 128",
        "gradient_accumulation_steps 8 makes it 128",
    ),
    "a margin above the whole": (("--margin", "120%"), "margin must be less than 1, not 120%",
        "it is the fraction of the GPU's memory to leave free for all but the allocator's cache, as 0.08 or 8%"),
    "no number of tokens": (("--tokens", "many"), "tokens must be a value such as 10e9 or 10B, not many",
        "it is the number of tokens to train on, such as 10e9 or 10B; the answer then has days and GPU hours"),
    "nothing to find": (("--find", "meaning"), "find must be gpus, batch, sequence or gpu-type, not meaning",
        "it is the quantity to optimize: the largest micro-batch (batch) or sequence that fits,"
        " the fewest GPUs (at most --gpus if that is above 1), or the smallest GPU (gpu-type)"),
    "a strategy that no such backend has": (("--strategy", "zero1", "--backend", "fsdp2"),
        "backend fsdp2 has no strategy zero1", "strategy zero1 needs backend deepspeed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_a_hint(name: str, cli: Cli) -> None:
    arguments, message, hint = BAD[name]
    ran = cli("recommend", "--model", "openai-community/gpt2", "--gpu", "H100", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines() == [f"fsdp-advisor: {message}", f"hint: {hint}"]
