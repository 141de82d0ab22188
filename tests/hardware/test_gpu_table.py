"""Every row of the GPU table is complete, has its sources, and is physically plausible."""

from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.advice import recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate
from fsdp_advisor.hardware import GPUS, LINKS, Gpu, Link, find_gpu, usual_host_bytes
from fsdp_advisor.hardware.links import ETHERNET_100G, NVLINK_4, PCIE_4_X16
from fsdp_advisor.units import GIB

each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
each_link = pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)

KNOWN_SPEED = [gpu for gpu in GPUS if gpu.architecture is not None]
each_of_known_speed = pytest.mark.parametrize("gpu", KNOWN_SPEED, ids=lambda gpu: gpu.name)

# ECC on GDDR memory takes a sixteenth of the memory; these cards are delivered with ECC enabled.
ECC_IN_GDDR = {"T4", "A2", "A10", "A10G", "A40", "L4", "L40", "L40S"}


def test_gpu_names_are_unique() -> None:
    names = [gpu.name for gpu in GPUS]
    assert len(names) == len(set(names)) >= 35


@each_gpu
def test_memory_is_a_little_less_than_nominal(gpu: Gpu) -> None:
    kept = gpu.memory_bytes / gpu.nominal_memory_bytes
    if not gpu.uses_torch_cuda:
        assert kept == 1 and "as advertised" in gpu.memory_source
    elif gpu.unified_memory:  # drivers reserve a part of it for the processor by default
        assert 0.48 < kept < 0.96
    elif gpu.name in ECC_IN_GDDR:
        assert 0.90 < kept < 15 / 16
    elif gpu.nominal_memory_bytes < 24 * GIB:  # the driver takes up to 0.6 GiB of any card
        assert 0.2 * GIB < gpu.nominal_memory_bytes - gpu.memory_bytes < 0.6 * GIB
    else:
        assert 0.97 < kept < 1
    assert isinstance(gpu.memory_bytes, int)


@each_of_known_speed
def test_rates_decrease_with_precision(gpu: Gpu) -> None:
    assert gpu.fp16_flops is not None and gpu.fp32_flops is not None and gpu.memory_bytes_per_s is not None
    if gpu.bf16_flops is not None:
        assert gpu.bf16_flops == gpu.fp16_flops
    rates = [rate for rate in (gpu.fp16_flops, gpu.tf32_flops, gpu.fp32_flops) if rate is not None]
    assert rates == sorted(rates, reverse=True)
    assert 4e12 <= gpu.fp32_flops <= gpu.fp16_flops <= 3e15
    assert 2e11 <= gpu.memory_bytes_per_s <= 8e12


def test_only_these_gpus_have_no_known_speed() -> None:
    unknown = {gpu.name for gpu in GPUS if gpu not in KNOWN_SPEED}
    assert unknown == {"DGX-Spark", "Strix-Halo", "Gaudi-3", "Trainium-2", "TPU-v6e"}


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu not in KNOWN_SPEED], ids=lambda gpu: gpu.name)
def test_gpu_of_unknown_speed_gives_memory_and_says_what_is_unknown(gpu: Gpu) -> None:
    report = estimate(model="gpt2", gpus=1, gpu=gpu.name, strategy="ddp", nnodes=1)
    (row,) = report.estimates
    assert row.peak_tensor_bytes is not None and row.fits
    assert row.step is None
    assert any(f"the rates that {gpu.name} achieves are not known" in text for text in row.not_modelled)
    assert any("shares its memory with the processor" in note for note in report.notes) == gpu.unified_memory
    assert any("counted as on a GPU" in note for note in report.notes) == (not gpu.uses_torch_cuda)
    assert row.overhead is not None
    names = {part.name for part in row.overhead.parts}
    expected: dict[str, set[str]] = {
        "cuda": {"CUDA context", "kernels"},
        "rocm": {"HIP context and RCCL", "further RCCL communicators"},
    }
    assert names == expected.get(gpu.runtime, set())


def test_card_with_two_sizes_is_found_by_its_size() -> None:
    assert find_gpu("RTX 5060 Ti").memory_bytes > 15 * GIB
    assert find_gpu("5060 ti 8gb").memory_bytes < 8 * GIB


@each_gpu
def test_fp16_rate_is_twice_the_tf32_rate(gpu: Gpu) -> None:
    if gpu.tf32_flops is not None:
        assert gpu.fp16_flops == pytest.approx(2 * gpu.tf32_flops, rel=0.02)


@each_of_known_speed
def test_dtypes_and_capability_match_the_architecture(gpu: Gpu) -> None:
    assert (gpu.bf16_flops is None) == (gpu.architecture in ("volta", "turing"))
    assert (gpu.tf32_flops is None) == (gpu.architecture in ("volta", "turing", "cdna2", "cdna4"))
    capability = {
        "volta": {(7, 0)}, "turing": {(7, 5)}, "ampere": {(8, 0), (8, 6)}, "ada": {(8, 9)}, "hopper": {(9, 0)},
        "blackwell": {(10, 0), (10, 3), (12, 0)}, "cdna2": {(9, 0)}, "cdna3": {(9, 4)}, "cdna4": {(9, 5)},
    }  # fmt: skip
    assert gpu.architecture is not None
    assert gpu.compute_capability in capability[gpu.architecture]


@each_gpu
def test_every_gpu_has_sources_and_links(gpu: Gpu) -> None:
    assert gpu.source and gpu.memory_source
    if gpu.architecture is None:
        return
    assert gpu.node_source
    assert gpu.intra_node in LINKS
    assert gpu.inter_node is not None and gpu.gpus_per_node is not None
    assert gpu.inter_node.kind not in ("nvlink", "pcie", "xgmi")
    assert gpu.intra_node is not None and gpu.intra_node.kind in ("nvlink", "pcie", "xgmi")
    assert 1 <= gpu.gpus_per_node <= 8
    assert gpu.inter_node.bytes_per_s < gpu.intra_node.bytes_per_s


@each_gpu
def test_host_memory_is_known_only_for_named_machines(gpu: Gpu) -> None:
    if gpu.host_memory_bytes is None:
        assert 0 < usual_host_bytes(gpu) == max(known.host_memory_bytes or 0 for known in GPUS)
    else:
        assert not gpu.node_source.startswith("assumed")
        assert 384 * 2**30 <= gpu.host_memory_bytes == usual_host_bytes(gpu) <= 2048 * 2**30


@each_of_known_speed
def test_only_amd_gpus_have_xgmi(gpu: Gpu) -> None:
    assert gpu.intra_node is not None
    assert gpu.full_name.startswith("AMD") == (gpu.intra_node.kind == "xgmi") == (gpu.runtime == "rocm")


@each_link
def test_every_link_has_a_plausible_rate_and_a_source(link: Link) -> None:
    assert 1e9 < link.bytes_per_s <= 900e9
    assert link.source
    assert link.latency_s is None or 1e-6 < link.latency_s < 1e-4
    assert link.peer_bytes_per_s is None or link.peer_bytes_per_s < link.bytes_per_s


def test_link_names_are_unique() -> None:
    assert len({link.name for link in LINKS}) == len(LINKS)


def test_link_rates_are_for_one_direction() -> None:
    assert NVLINK_4.bytes_per_s == 450e9
    assert PCIE_4_X16.bytes_per_s == pytest.approx(31.5e9, rel=0.001)


def test_shared_adapter_is_divided_by_its_gpus() -> None:
    share = ETHERNET_100G.shared_by(8)
    assert share.bytes_per_s * 8 == ETHERNET_100G.bytes_per_s
    assert share.name == "Ethernet 100 Gb/s / 8 GPUs"
    assert ETHERNET_100G.shared_by(1) is ETHERNET_100G
    with pytest.raises(ValueError, match="0 GPUs"):
        ETHERNET_100G.shared_by(0)


@each_of_known_speed
def test_fp32_rate_implies_a_plausible_clock(gpu: Gpu) -> None:
    assert gpu.multiprocessors is not None and gpu.fp32_flops is not None
    half_lanes = gpu.architecture in ("volta", "turing") or gpu.name.startswith(("A100", "A800", "A30"))
    lanes = 256 if (gpu.architecture or "").startswith("cdna") else 64 if half_lanes else 128
    clock_hz = gpu.fp32_flops / (gpu.multiprocessors * lanes * 2)
    assert 0.8e9 < clock_hz < 2.8e9


UNIFIED = [gpu.name for gpu in GPUS if gpu.unified_memory]


@pytest.mark.parametrize("gpu", UNIFIED)
def test_gpu_that_shares_the_hosts_memory_has_no_rows_that_offload(gpu: str) -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B", "gpus": 1, "gpu": gpu}
    assert {row.offload for row in estimate(**job).estimates} == {"none"}
    for offload in ({"offload": "optimizer"}, {"offload": "parameters"}, {"activation_offload": True}):
        with pytest.raises(UsageError, match="shares its memory with the processor"):
            estimate(**job, activation_checkpointing="full", **offload)
    with pytest.raises(UsageError, match="a paged optimizer saves nothing"):
        estimate(**job, optim="paged_adamw_8bit")


@in_turn(1, of=3)
def test_recommendation_for_a_gpu_that_shares_the_hosts_memory_does_not_offload() -> None:
    found = recommend(model="meta-llama/Llama-3.1-8B", gpus=1, gpu="DGX-Spark", method="any").recommendation
    assert found.winner is not None and found.winner.plan.offload == "none"
    full, lora, _ = found.methods
    assert full.advice is not None and not full.advice.recommendation.fits
    assert lora.advice is not None and lora.advice.recommendation.winner is found.winner
    assert not any("offload" in remedy.options for remedy in full.advice.recommendation.remedies)
