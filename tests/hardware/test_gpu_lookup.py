"""GPU names as users type them and as drivers print them, memory sizes, and unknown names."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.errors import UnknownGpu
from fsdp_advisor.hardware import GPUS, Gpu, find_gpu, list_gpus
from fsdp_advisor.hardware.lookup import canonical_name

GIB = 2**30

TYPED = {
    "H100": "H100-80GB",
    "H100-80GB": "H100-80GB",
    "h100_sxm": "H100-80GB",
    "H100 SXM5 80GB": "H100-80GB",
    "h100-80g": "H100-80GB",
    "h100 pcie": "H100-PCIe",
    "h100nvl": "H100-NVL",
    "rtx4090": "RTX-4090",
    "RTX 4090": "RTX-4090",
    "4090": "RTX-4090",
    "GeForce RTX 2080Ti": "RTX-2080-Ti",
    "RTX6000-Ada": "RTX-6000-Ada",
    "A6000": "RTX-A6000",
    "A100": "A100-80GB",
    "a100-40gb": "A100-40GB",
    "A100 80 GiB PCIe": "A100-80GB-PCIe",
    "V100": "V100-32GB",
    "A10": "A10",
    "a10g": "A10G",
    "  l40s ": "L40S",
    "mi300x": "MI300X",
    "GB200": "GB200",
    "5070ti": "RTX-5070-Ti",
    "RTX 5060 Ti 8GB": "RTX-5060-Ti-8GB",
    "H100 96GB": "H100-96GB",
    "dgx spark": "DGX-Spark",
    "GB10": "DGX-Spark",
    "strix halo": "Strix-Halo",
    "gaudi3": "Gaudi-3",
    "trn2": "Trainium-2",
    "tpu v6e": "TPU-v6e",
    "HGX B300": "B300",
    "h200 nvl": "H200-NVL",
    "DGX B200": "B200",
    "spark": "DGX-Spark",
    "h100-80": "H100-80GB",
    "A100 40": "A100-40GB",
    "rtx 5050": "RTX-5050",
    "4070 ti super": "RTX-4070-Ti-SUPER",
    "4060ti 16gb": "RTX-4060-Ti-16GB",
    "rtx pro 6000 max-q": "RTX-PRO-6000-Max-Q",
    "RTX 3080 12GB": "RTX-3080-12GB",
    "RTX 3080 10GB": "RTX-3080",
    "4060 ti 8gb": "RTX-4060-Ti-8GB",
    "A4000": "RTX-A4000",
    "RTX 8000": "Quadro-RTX-8000",
    "V100 PCIe": "V100-PCIe-32GB",
    "mi350x": "MI350X",
    "RTX PRO 6000 Server Edition": "RTX-PRO-6000-Server",
    "rtx pro 6000 workstation edition": "RTX-PRO-6000",
}

# Output of torch.cuda.get_device_name.
PRINTED = {
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla V100-PCIE-16GB": "V100-PCIe-16GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
    "Quadro RTX 8000": "Quadro-RTX-8000",
    "NVIDIA GeForce RTX 3080": "RTX-3080",
    "NVIDIA GeForce RTX 3080 Ti": "RTX-3080-Ti",
    "NVIDIA GeForce RTX 3070": "RTX-3070",
    "NVIDIA GeForce RTX 3070 Ti": "RTX-3070-Ti",
    "NVIDIA GeForce RTX 3060 Ti": "RTX-3060-Ti",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX-4070-SUPER",
    "NVIDIA GeForce RTX 4070": "RTX-4070",
    "NVIDIA GeForce RTX 4060": "RTX-4060",
    "NVIDIA A2": "A2",
    "NVIDIA RTX A4000": "RTX-A4000",
    "NVIDIA RTX A4500": "RTX-A4500",
    "NVIDIA RTX A5500": "RTX-A5500",
    "NVIDIA GeForce RTX 2080 Ti": "RTX-2080-Ti",
    "NVIDIA TITAN RTX": "Titan-RTX",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 3090 Ti": "RTX-3090-Ti",
    "NVIDIA GeForce RTX 3060": "RTX-3060",
    "NVIDIA GeForce RTX 4070 Ti": "RTX-4070-Ti",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX-4070-Ti-SUPER",
    "NVIDIA GeForce RTX 4060 Ti": "RTX-4060-Ti-16GB",
    "NVIDIA GeForce RTX 5050": "RTX-5050",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX-PRO-6000-Max-Q",
    "AMD Instinct MI350X": "MI350X",
    "NVIDIA GeForce RTX 4080": "RTX-4080",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX-4080-SUPER",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GeForce RTX 5060": "RTX-5060",
    "NVIDIA GeForce RTX 5060 Ti": "RTX-5060-Ti-16GB",
    "NVIDIA GeForce RTX 5070": "RTX-5070",
    "NVIDIA GeForce RTX 5070 Ti": "RTX-5070-Ti",
    "NVIDIA GeForce RTX 5080": "RTX-5080",
    "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A5000": "RTX-A5000",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Server",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB-PCIe",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA A800-SXM4-80GB": "A800-80GB",
    "NVIDIA H20": "H20",
    "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA H800": "H800",
    "NVIDIA H200": "H200",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
    "NVIDIA GB10": "DGX-Spark",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI250X/MI250": "MI250X",
    "AMD Instinct MI300A": "MI300A",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI355X": "MI355X",
    "Radeon 8060S Graphics": "Strix-Halo",
}

NOT_PRINTED = {"H100-96GB", "RTX-3080-12GB", "RTX-4060-Ti-8GB", "RTX-5060-Ti-8GB", "Gaudi-3", "Trainium-2", "TPU-v6e"}
"""Boards that print the name of another one, and accelerators that torch.cuda does not see."""


@pytest.mark.parametrize(("typed", "name"), [*TYPED.items(), *PRINTED.items()])
def test_typed_or_printed_name_finds_the_gpu(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("M3 Max", "Apple's GPUs"),
        ("Apple M2 Ultra", "Apple's GPUs"),
        ("MacBook Pro", "Apple's GPUs"),
        ("mps", "Apple's GPUs"),
        ("GTX 1080 Ti", "GPUs before Volta"),
        ("Tesla P100", "GPUs before Volta"),
        ("P40", "GPUs before Volta"),
        ("GTX 1660 Super", "the GTX 16 series"),
        ("Arc A770", "Intel's GPUs"),
        ("inferentia2", "of AWS's devices"),
    ],
)
def test_a_device_that_is_not_modelled_is_refused_with_the_reason(typed: str, reason: str) -> None:
    with pytest.raises(UnknownGpu) as refused:
        find_gpu(typed)
    assert refused.value.hint.startswith(reason) and "16GiB" in refused.value.hint


def test_every_gpu_has_a_printed_name() -> None:
    assert {gpu.name for gpu in GPUS} == set(PRINTED.values()) | NOT_PRINTED


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_spelling_of_a_name_finds_the_gpu(gpu: Gpu) -> None:
    for name in (gpu.name, gpu.full_name, *gpu.aliases):
        for spelling in (name, name.lower(), name.upper(), name.replace("-", " "), name.replace("-", "_")):
            assert find_gpu(spelling) is gpu


def test_no_name_belongs_to_two_gpus() -> None:
    owners: dict[str, set[str]] = {}
    for gpu in GPUS:
        for name in (gpu.name, gpu.full_name, *gpu.aliases):
            owners.setdefault(canonical_name(name), set()).add(gpu.name)
    assert {key: names for key, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize(
    ("size", "memory_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("80 GiB", 80 * GIB),
        ("24GB", 24 * 10**9),
        ("0.5TB", 500 * 10**9),
        ("22.5GiB", 45 * GIB // 2),
        ("81920MiB", 80 * GIB),
    ],
)
def test_size_gives_a_gpu_without_rates(size: str, memory_bytes: int) -> None:
    gpu = find_gpu(size)
    assert (gpu.name, gpu.memory_bytes) == (size, memory_bytes)
    rates = (gpu.bf16_flops, gpu.fp16_flops, gpu.tf32_flops, gpu.fp32_flops, gpu.memory_bytes_per_s)
    assert rates == (None,) * 5
    assert gpu.intra_node is None and gpu.inter_node is None and gpu.gpus_per_node is None


@given(
    n=st.integers(1, 999),
    unit=st.sampled_from(["GiB", "GB"]),
    space=st.sampled_from(["", " ", "  "]),
    change=st.sampled_from([str.lower, str.upper, str.title, str]),
)
def test_gib_and_gb_are_distinguished(n: int, unit: str, space: str, change: Callable[[str], str]) -> None:
    scale = GIB if unit == "GiB" else 10**9
    text = change(f"{n}{space}{unit}")
    if n * scale < GIB:  # 1GB
        with pytest.raises(UnknownGpu):
            find_gpu(text)
    else:
        assert find_gpu(text).memory_bytes == n * scale


@given(mib=st.integers(1024, 1024 * 1024))
def test_size_may_be_a_fraction(mib: int) -> None:
    assert find_gpu(f"{mib / 1024:.10f}GiB").memory_bytes == pytest.approx(mib * 2**20, abs=1)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("h1oo", "H100-80GB"),
        ("rtx5900", "RTX-5090"),
        ("RTX 6000 Pro", "RTX-PRO-6000? "),
        ("6000 Ada RTX", "RTX-6000-Ada? "),
        ("tpu v5p", "TPU-v6e"),
        ("gaudi2", "Gaudi-3"),
        ("mi250", "MI250X"),
        ("ascend 910b", None),
        ("mac studio", None),
        ("arc b580", None),
        ("max 1550", None),
    ],
)
def test_only_near_names_are_suggested(typed: str, near: str | None) -> None:
    with pytest.raises(UnknownGpu) as unknown:
        find_gpu(typed)
    hint = str(unknown.value.hint)
    assert hint.startswith(f"did you mean {near}") if near else "did you mean" not in hint


@pytest.mark.parametrize("typed", ["8xH100", "8 x h100 80GB", "H100 x8", "H100*8"])
def test_number_of_gpus_is_told_from_their_name(typed: str) -> None:
    with pytest.raises(UnknownGpu) as unknown:
        find_gpu(typed)
    assert unknown.value.hint == "--gpus 8 --gpu H100-80GB"


@given(st.text(max_size=40))
def test_any_text_finds_a_gpu_or_raises_with_a_hint(text: str) -> None:
    try:
        assert find_gpu(text).memory_bytes >= GIB
    except UnknownGpu as refusal:
        assert refusal.hint
        assert "\n" not in refusal.hint


@pytest.mark.parametrize(
    "size",
    ["0GiB", "0.0 GB", "-24GiB", "- 24 GiB", "-0GiB", "1MiB", "5TiB", "1e999GiB", "9" * 400 + "GiB", "80", "24 B"],
)
def test_impossible_size_raises(size: str) -> None:
    with pytest.raises(UnknownGpu) as refusal:
        find_gpu(size)
    assert "24GiB" in refusal.value.hint and "1024GiB" in refusal.value.hint


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("H10", "H100-80GB"),
        ("RTX 3090 Super", "RTX-3090"),
        ("MI300Z", "MI300X"),
        ("A1000", "A100-80GB"),
        ("h100-80gb-pci", "H100-PCIe"),
        ("A100-SXM4-80GB MIG 1g.10gb", "A100-80GB"),
        ("rtx pro 6000 max", "RTX-PRO-6000"),
    ],
)
def test_unknown_name_raises_with_nearest_name(typo: str, meant: str) -> None:
    with pytest.raises(UnknownGpu) as refusal:
        find_gpu(typo)
    assert refusal.value.message == f"unknown GPU {typo!r}"
    assert meant in refusal.value.hint


@pytest.mark.parametrize("name", ["", "   ", "!?", "nvidia", "toaster", "z" * 100_000])
def test_name_without_neighbours_still_has_a_hint(name: str) -> None:
    with pytest.raises(UnknownGpu) as refusal:
        find_gpu(name)
    assert refusal.value.hint == "`fsdp-advisor gpus` lists all GPUs; a memory size such as 24GiB also works"


def test_list_gpus_filters_by_any_name() -> None:
    assert list_gpus() == GPUS
    assert [gpu.name for gpu in list_gpus("h100")] == ["H100-80GB", "H100-96GB", "H100-PCIe", "H100-NVL"]
    assert [gpu.name for gpu in list_gpus("AMD")] == [
        "MI210",
        "MI250X",
        "MI300A",
        "MI300X",
        "MI325X",
        "MI350X",
        "MI355X",
        "Strix-Halo",
    ]
    assert [gpu.name for gpu in list_gpus("a100-sxm4-40gb")] == ["A100-40GB"]
    assert list_gpus("toaster") == ()


@pytest.mark.parametrize("architecture", sorted({gpu.architecture for gpu in GPUS if gpu.architecture}))
def test_list_gpus_finds_an_architecture(architecture: str) -> None:
    assert {gpu for gpu in GPUS if gpu.architecture == architecture} <= set(list_gpus(architecture.title()))


def test_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, fsdp_advisor.hardware as h; h.find_gpu('H100')\n"
        "print([m for m in ('pynvml', 'pydantic', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
