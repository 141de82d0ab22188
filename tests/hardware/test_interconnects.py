"""Names and rates of the network between nodes."""

from __future__ import annotations

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate
from fsdp_advisor.hardware import LINKS, find_gpu, find_interconnect

H100, A100, V100 = find_gpu("H100"), find_gpu("A100"), find_gpu("V100")

PER_GPU = {
    "InfiniBand NDR": 50e9, "infiniband ndr 400 Gb/s": 50e9, "ndr": 50e9, "NDR400": 50e9, "IB": 50e9, "hdr": 25e9,
    "InfiniBand-HDR": 25e9, "xdr": 100e9, "RoCE": 50e9, "roce 200": 25e9, "RoCE 200 Gb/s": 25e9, "Slingshot": 25e9,
    "400Gb/s": 50e9, "400 Gbps": 50e9, "400gbit/s": 50e9, "50GB/s": 50e9, "50 GB/s": 50e9, "0.4Tb/s": 50e9,
    "8x200Gb/s": 25e9, "4 x 400Gb/s": 25e9, "EFA": 50e9, "EFA 400 Gb/s": 6.25e9, "efa 3200": 50e9,
    "100GbE": 1.5625e9, "Ethernet 10 Gb/s": 0.15625e9, "ethernet 40": 0.625e9, "25gbe": 0.390625e9,
}  # fmt: skip


@pytest.mark.parametrize("typed", PER_GPU)
def test_typed_name_or_rate_gives_the_share_of_a_gpu(typed: str) -> None:
    assert find_interconnect(typed, H100, 8).bytes_per_s == pytest.approx(PER_GPU[typed])


def test_efa_means_the_generation_of_the_gpu() -> None:
    assert find_interconnect("EFA", A100, 8).bytes_per_s == 400e9 / 8 / 8
    assert find_interconnect("EFA", V100, 8).bytes_per_s == 100e9 / 8 / 8


def test_every_network_is_found_by_its_name() -> None:
    for link in LINKS:
        if link.kind not in ("nvlink", "pcie", "xgmi"):
            assert find_interconnect(link.name, H100, 1) == link


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("infniband", "InfiniBand NDR"),
        ("rocce", "RoCE"),
        ("etherent", "Ethernet"),
        ("carrier pigeon", "400Gb/s"),
        ("wifi", "InfiniBand NDR, RoCE, EFA"),
        ("10", "10Gb/s or 10GB/s"),
        ("", "400Gb/s"),
        ("50", "50GB/s"),
        ("0Gb/s", "10Mb/s"),
    ],
)
def test_unknown_interconnect_raises_with_nearest_name(typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_interconnect(typed, H100, 8)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("typed", "assumed"),
    [
        ("Ethernet", "Ethernet 100 Gb/s / 8 GPUs"),
        ("ib", "InfiniBand NDR 400 Gb/s"),
        ("ndr", None),
        ("25GbE", None),
        ("1Gb/s", None),
    ],
)
def test_the_rate_of_a_network_is_named_if_it_is_assumed(typed: str, assumed: str | None) -> None:
    notes = estimate(model="gpt2", gpus=16, nnodes=2, gpu="H100", strategy="zero3", interconnect=typed).notes
    found = [note for note in notes if note.startswith("interconnect")]
    expected = [] if assumed is None else [f"interconnect {typed}: {assumed}"]
    assert [note.partition(" is assumed")[0] for note in found] == expected


def test_request_keeps_the_case_of_an_interconnect() -> None:
    """Lower-case b means bits, upper-case B bytes."""
    bits, bytes_ = (
        estimate(model="gpt2", gpus=16, nnodes=2, gpu="A100", strategy="zero3", interconnect=typed).estimates[0].step
        for typed in ("1Gb/s", "1GB/s")
    )
    assert bits is not None and bytes_ is not None
    assert bits.breakdown["communication"] > 4 * bytes_.breakdown["communication"]
