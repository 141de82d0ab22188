"""Collectives over their links, against what nccl-tests publishes and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.hardware.links import ETHERNET_100G, INFINIBAND_NDR, NVLINK_3, NVLINK_4, XGMI_MI300X
from fsdp_advisor.timing.collectives import Group, all_gather_s, all_reduce_s


def bus_bytes_per_s(n_bytes: float, group: Group) -> float:
    """As nccl-tests defines it for an all-gather."""
    return n_bytes * (group.ranks - 1) / group.ranks / all_gather_s(n_bytes, group)


@pytest.mark.parametrize(
    ("group", "published"),
    [
        (Group(8, 1, NVLINK_3, INFINIBAND_NDR), 231e9),  # A100: NVIDIA/nccl issue 527
        (Group(8, 1, NVLINK_4, INFINIBAND_NDR), 370e9),  # H100: NVIDIA/nccl-tests issue 212
        (Group(256, 32, NVLINK_4, INFINIBAND_NDR), 340e9),  # NVIDIA/nccl issue 1218: all-reduce
    ],
)
def test_large_messages_reach_the_published_bus_bandwidth(group: Group, published: float) -> None:
    assert bus_bytes_per_s(8e9, group) == pytest.approx(published, rel=0.10)


def test_alone_there_is_nothing_to_send() -> None:
    alone = Group(1, 1, NVLINK_4, INFINIBAND_NDR)
    assert all_gather_s(1e9, alone) == all_reduce_s(1e9, alone) == 0


def test_a_mesh_of_two_has_one_link() -> None:
    two, eight = (Group(n, 1, XGMI_MI300X, INFINIBAND_NDR) for n in (2, 8))
    assert two.seconds_per_byte == pytest.approx(7 * eight.seconds_per_byte)


def test_a_node_leaves_through_all_its_adapters() -> None:
    shared = Group(16, 2, NVLINK_4, ETHERNET_100G.shared_by(8))
    assert bus_bytes_per_s(8e9, shared) == pytest.approx(ETHERNET_100G.bytes_per_s * 0.7, rel=0.05)


@given(st.floats(1, 1e10), st.integers(1, 128), st.floats(1, 10))
def test_more_bytes_take_longer_and_more_bandwidth_less(n_bytes: float, nodes: int, times: float) -> None:
    group = Group(8 * nodes, nodes, NVLINK_4, INFINIBAND_NDR)
    faster = Group(8 * nodes, nodes, NVLINK_4, replace(INFINIBAND_NDR, bytes_per_s=5e10 * times))
    for collective in (all_gather_s, all_reduce_s):
        assert collective(n_bytes, group) <= collective(2 * n_bytes, group)
        assert collective(n_bytes, faster) <= collective(n_bytes, group)
