"""Whole outputs, compared with files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

LLAMA2 = ("--model", "meta-llama/Llama-2-7b-hf", "--gpus", "4", "--gpu", "H100")
LLAMA31 = ("--model", "meta-llama/Llama-3.1-8B", "--gpu", "A100-40GB")
COUNT = ("--model", "7e9", "--gpus", "4", "--gpu", "H100", "--precision", "fp32")

CASES: dict[str, tuple[tuple[str, ...], int, int]] = {
    # file: (arguments after `estimate`, columns, exit status)
    "llama2_4gpus.txt": (LLAMA2, 120, 0),
    "llama2_4gpus_60.txt": (LLAMA2, 60, 0),
    "llama2_4gpus_80.txt": (LLAMA2, 80, 0),
    "llama2_4gpus_200.txt": (LLAMA2, 200, 0),
    "llama2_4gpus.md": ((*LLAMA2, "--format", "markdown"), 120, 0),
    "llama2_4gpus.json": ((*LLAMA2, "--json"), 120, 0),
    "llama2_explain_zero3.txt": ((*LLAMA2, "--explain", "zero3"), 120, 0),
    "llama2_explain_zero3_60.txt": ((*LLAMA2, "--strategy", "zero3", "--explain", "zero3"), 60, 0),
    "llama2_explain_accumulation.txt": (
        (*LLAMA2, "--strategy", "zero2", "--explain", "zero2", "--gradient-accumulation-steps", "4"),
        120,
        0,
    ),
    "llama2_one_gpu_does_not_fit.txt": (("--model", "meta-llama/Llama-2-7b-hf", "--gpu", "24GiB"), 120, 0),
    "llama2_ddp_does_not_fit.txt": ((*LLAMA2, "--strategy", "ddp"), 120, 1),
    "llama31_two_nodes_explain_hsdp.txt": (
        (*LLAMA31, "--gpus", "16", "--nnodes", "2", "--activation-checkpointing", "full", "--explain", "hsdp"),
        120,
        0,
    ),
    "llama31_full_offload.md": (
        (*LLAMA31, "--gpus", "2", "--offload", "parameters", "--seq-len", "4096", "--format", "markdown"),
        120,
        0,
    ),
    "llama31_fsdp1_timeline.json": (
        (*LLAMA31, "--gpus", "8", "--strategy", "zero3", "--backend", "fsdp1", "--explain", "zero3", "--json"),
        120,
        0,
    ),
    "count_fp32.txt": (COUNT, 120, 1),
    "count_fp32_60.txt": (COUNT, 60, 1),
    "count_fp32_explain.txt": ((*COUNT, "--strategy", "zero3", "--explain", "zero3"), 120, 1),
    "count_fp32.md": ((*COUNT, "--format", "markdown"), 120, 1),
    "count_fp32.json": ((*COUNT, "--json"), 120, 1),
}


def rounded(value: Any) -> Any:
    """A JSON value with four significant digits in every number: tests of figures compare the others."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return type(value)(float(f"{value:.4g}"))


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_equals_its_golden_file(
    name: str, cli: Callable[..., object], golden: Callable[[str, str], None]
) -> None:
    arguments, columns, status = CASES[name]
    ran = cli("estimate", *arguments, columns=columns)
    assert ran.err == ""
    golden(name, json.dumps(rounded(json.loads(ran.out)), indent=2) + "\n" if name.endswith(".json") else ran.out)
    assert ran.status == status


def test_the_list_of_gpus_equals_its_golden_file(
    cli: Callable[..., object], golden: Callable[[str, str], None]
) -> None:
    golden("gpus_h100.txt", cli("gpus", "h100").out)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".txt")])
def test_text_stays_within_the_screen(name: str, cli: Callable[..., object]) -> None:
    arguments, columns, _ = CASES[name]
    assert max(map(len, cli("estimate", *arguments, columns=columns).out.splitlines())) <= columns


def test_a_parameter_count_gives_the_states_of_the_textbook(cli: Callable[..., object]) -> None:
    """The ZeRO paper's formulas for 7e9 parameters in fp32 with AdamW on 4 GPUs, and what backends keep: DeepSpeed has masters, FSDP's
    ZeRO-2 shards parameters.
    """
    estimates = json.loads(cli("estimate", *COUNT, "--json").out)["estimates"]
    rows = [e for e in estimates if e["offload"] == "none"]
    textbook = {e["strategy"]: sum(e["states"].values()) / 10**9 for e in rows}
    assert textbook == {"ddp": 112, "zero1": 70, "zero2": 49, "zero3": 28}
    assert {e["strategy"]: e["kept_bytes"] / 10**9 for e in rows} == {"ddp": 112, "zero1": 77, "zero2": 28, "zero3": 28}
    assert {e["fits"] for e in estimates} == {False, None}
    assert all(e["peak_tensor_bytes"] is None for e in estimates)
    lines = cli("estimate", *COUNT).out.splitlines()
    columns = lines[2].split()
    shown = {name: [line.split()[columns.index(name)] for line in lines[3:7]] for name in ("textbook", "states")}
    assert shown == {"textbook": ["112.00", "70.00", "49.00", "28.00"], "states": ["112.00", "77.00", "28.00", "28.00"]}
