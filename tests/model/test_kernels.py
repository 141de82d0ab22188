import pytest

from fsdp_advisor.model import catalog
from fsdp_advisor.model.kernels import kernel_notes


@pytest.mark.parametrize(
    ("model", "is_said"),
    [("Qwen/Qwen3.5-9B", True), ("Qwen/Qwen3-Next-80B-A3B-Instruct", True), ("Qwen/Qwen3-8B", False)],
)
def test_an_answer_names_the_packages_that_it_assumes(model: str, is_said: bool) -> None:
    entry = catalog.find(model)
    assert entry is not None
    assert any("flash-linear-attention" in note for note in kernel_notes(catalog.profile(entry))) is is_said


@pytest.mark.parametrize(
    ("model", "is_said"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", True),
        ("ibm-granite/granite-4.0-h-small", True),
        ("ibm-granite/granite-4.0-micro", False),
        ("Qwen/Qwen3.5-9B", False),
    ],
)
def test_an_answer_says_that_scan_kernels_are_not_modelled(model: str, is_said: bool) -> None:
    entry = catalog.find(model)
    assert entry is not None
    assert any("mamba-ssm" in note for note in kernel_notes(catalog.profile(entry))) is is_said
