import re
from dataclasses import replace

import pytest
from matrix import in_turn

from fsdp_advisor import estimate
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog
from fsdp_advisor.model.kernels import kernel_notes, kernels_refusal
from fsdp_advisor.tape_keys import tape_key_of

REQUEST = make_request({"model": "gpt2"})
QWEN, NEMOTRON, LLAMA = "Qwen/Qwen3.5-9B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("model", "is_said"),
    [
        ("Qwen/Qwen3.5-9B", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ("Qwen/Qwen3-8B", False),
        ("moonshotai/Kimi-Linear-48B-A3B-Base", True),
    ],
)
def test_an_answer_names_the_packages_that_it_assumes(model: str, is_said: bool) -> None:
    entry = catalog.find(model)
    assert entry is not None
    assert any("flash-linear-attention" in note for note in kernel_notes(REQUEST, catalog.profile(entry))) is is_said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "mamba-ssm and causal-conv1d are assumed to be installed"),
        ("ibm-granite/granite-4.0-h-small", "mamba-ssm and causal-conv1d are assumed to be installed"),
        ("state-spaces/mamba-130m-hf", "mamba-ssm and causal-conv1d are assumed to be installed"),
        ("ai21labs/Jamba-v0.1", "mamba-ssm and causal-conv1d are assumed to be installed"),
        ("ibm-granite/granite-4.0-micro", ""),
        ("Qwen/Qwen3.5-9B", ""),
    ],
)
def test_an_answer_says_what_is_assumed_of_scan_kernels(model: str, said: str) -> None:
    entry = catalog.find(model)
    assert entry is not None
    notes = [note for note in kernel_notes(REQUEST, catalog.profile(entry)) if "mamba-ssm" in note]
    assert len(notes) == bool(said) and all(said in note for note in notes)


@pytest.mark.parametrize(
    ("model", "packages", "option"),
    [
        (QWEN, "all", ""),
        (QWEN, "fla,causal-conv1d", ""),
        (QWEN, "fla", "|without=causal-conv1d"),
        (QWEN, "none", "|without=fla,causal-conv1d|at=1x2048"),
        (NEMOTRON, "fla", "|without=mamba-ssm,causal-conv1d"),
        ("state-spaces/mamba-130m-hf", "causal_conv1d", "|without=mamba-ssm|at=1x2048"),
        (LLAMA, "none", ""),
    ],
)
def test_packages_that_a_model_calls_and_lacks_are_in_the_key(model: str, packages: str, option: str) -> None:
    request = make_request({"model": model, "gpus": 8, "strategy": "zero3", "kernel_packages": packages})
    (plan,), entry = plans(request, seq_len=2048), catalog.find(model)
    assert entry is not None
    usual, key = (tape_key_of(each, catalog.profile(entry)) for each in (replace(plan, kernel_packages="all"), plan))
    assert key.name == usual.name + option


def test_mamba_ssm_without_causal_conv1d_is_refused() -> None:
    with pytest.raises(UsageError, match="call causal-conv1d, and fail"):
        estimate(model=NEMOTRON, gpus=8, kernel_packages="mamba-ssm")


@pytest.mark.parametrize(("model", "tokens"), [("state-spaces/mamba-130m-hf", 2048), (QWEN, 131_072)])
def test_a_loop_without_kernels_is_estimated_up_to_a_length(model: str, tokens: int) -> None:
    entry, options = catalog.find(model), {"model": model, "kernel_packages": "none"}
    assert entry is not None
    profile = catalog.profile(entry)
    refused = []
    for seq_len in (tokens, tokens + 1):
        plan, *_ = plans(make_request(options), seq_len=seq_len)
        refused.append(kernels_refusal(profile, plan) is not None)
    assert refused == [False, True]


def test_packages_that_a_model_does_not_call_are_ignored_with_a_note() -> None:
    report = estimate(model=LLAMA, gpus=8, strategy="zero3", kernel_packages="none")
    assert any("kernel_packages is ignored" in note for note in report.notes)


@in_turn(1, of=3)
def test_an_answer_says_what_missing_packages_cost_and_how_to_install_them() -> None:
    pytest.importorskip("torch")
    report = estimate(model=QWEN, gpus=8, strategy="zero3", seq_len=256, kernel_packages="none")
    assert any("pip install flash-linear-attention causal-conv1d" in note for note in report.notes)
    (row,) = report.estimates
    assert any(
        re.search(r"without fla and causal-conv1d it needs [\d.]+ GiB more and [\d.]+ times", w) for w in row.warnings
    )
