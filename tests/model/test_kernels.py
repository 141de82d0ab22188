import pytest

from fsdp_advisor.model import catalog
from fsdp_advisor.model.kernels import kernel_notes


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
    assert any("flash-linear-attention" in note for note in kernel_notes(catalog.profile(entry))) is is_said


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
    notes = [note for note in kernel_notes(catalog.profile(entry)) if "mamba-ssm" in note]
    assert len(notes) == bool(said) and all(said in note for note in notes)
