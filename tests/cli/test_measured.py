"""`estimate --validate`: without a GPU, PyTorch's own code is simulated and agrees with the estimate to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, with_all_cases

from fsdp_advisor import estimate
from fsdp_advisor.cli import measured as comparison
from fsdp_advisor.validation.records import Record

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 500, "max_position_embeddings": 128,
}  # fmt: skip


def validated(cli: Callable[..., Any], folder: Path, *arguments: str) -> Any:
    (folder / "config.json").write_text(json.dumps(TINY))
    done = cli("estimate", "--model", str(folder), "--gpus", "4", "--gpu", "T4", "--validate", *arguments)
    assert done.status == 0, done.err
    return done


@in_turn(0, of=3)
@pytest.mark.skipif(
    pytest.importorskip("torch").cuda.is_available(), reason="this machine has a GPU, so it does not simulate"
)
def test_json_has_the_measured_figures(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = validated(cli, tmp_path, "--json", "-q", "--strategy", "zero3")
    (row,) = json.loads(done.out)["estimates"]
    assert row["measured"]["mode"] == "simulate" and row["measured"]["outcome"] == "ok"
    assert row["measured"]["figures"]["peak_tensor_bytes"] == row["peak_tensor_bytes"]
    assert set(row["measured"]["errors"].values()) == {0.0}


@with_all_cases
@pytest.mark.skipif(
    pytest.importorskip("torch").cuda.is_available(), reason="this machine has a GPU, so it does not simulate"
)
def test_text_compares_figures_and_says_what_was_not_run(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = validated(cli, tmp_path, "--backend", "fsdp2")
    lines = done.out[done.out.index("predicted and measured:") :].splitlines()
    assert sum(line.endswith("+0.000%") for line in lines) == 2  # zero2 and zero3
    assert any("not run: ZeRO-3 + parameter offload: offload parameters cannot be simulated" in line for line in lines)
    assert "simulate: this machine has no GPU" in done.err


def test_gpu_figures_are_compared_with_their_own_prediction() -> None:
    report = estimate(model="openai-community/gpt2", gpus=8, strategy="zero3", gpu="H100-80GB")
    measured = {"peak_allocated_bytes": 2 << 30, "peak_reserved_bytes": 4 << 30, "peak_device_bytes": 5 << 30}
    predicted = {"peak_allocated_bytes": 2 << 30, "peak_reserved_bytes": 3 << 30, "peak_device_bytes": 4 << 30}
    record = Record(
        request={**report.request.as_dict(), "backend": "fsdp2", "seq_len": 1024},
        mode="stand-in", device="cuda", outcome="ok", measured=measured, predicted=predicted,
    )  # fmt: skip
    lines = comparison.comparison_lines(report, [record])
    assert [line.split()[3] for line in lines[2:]] == ["allocated", "reserved", "device"]
    assert lines[3].split()[-1] == "-25.000%" and "3.00 GiB" in lines[3] and "4.00 GiB" in lines[3]
    document = report.as_dict()
    comparison.add_to_json(document, [record])
    shown = document["estimates"][0]["measured"]
    assert shown["predicted"] == predicted and shown["errors"]["peak_reserved_bytes"] == -0.25


def test_out_of_memory_is_shown_with_its_message() -> None:
    report = estimate(model="openai-community/gpt2", gpus=8, strategy="zero3", gpu="H100-80GB")
    request = {**report.request.as_dict(), "backend": "fsdp2", "seq_len": 1024}
    record = Record(request=request, mode="stand-in", device="cuda", outcome="oom", message="CUDA out of memory.")
    lines = comparison.comparison_lines(report, [record])
    assert "oom" in lines[2] and lines[-1].endswith("ZeRO-3: CUDA out of memory.")
