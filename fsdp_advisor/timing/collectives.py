"""The time of a collective: a closed form for NCCL's rings over the links within a node and between nodes.

Source: Thakur et al., Optimization of Collective Communication Operations in MPICH (2005), for the ring; NCCL's
src/graph/tuning.cc for hops and latencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from fsdp_advisor.hardware.links import Link
from fsdp_advisor.timing.achieved import COLLECTIVE_START_S, bus_bytes_per_s, latency_s


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `ranks` ranks, distributed evenly over `nodes` nodes.

    A rank reaches the ranks of its node over `inside`, and other nodes over `between`, its share of the node's adapters.
    """

    ranks: int
    nodes: int
    inside: Link | None
    between: Link

    @cached_property
    def hop_s(self) -> float:
        """Seconds of all hops of one turn around the ring."""
        inside = 0.0 if self.inside is None else latency_s(self.inside)
        across = latency_s(self.between) * (self.nodes - 1)
        return (self.ranks - self.nodes) * inside + across

    @cached_property
    def seconds_per_byte(self) -> float:
        """Seconds per byte that each rank sends. The slower of the two kinds of link determines the ring's rate.

        The rings of a node's ranks leave the node in parallel, each through its own adapter. So between nodes, the data of all
        ranks of a node share all adapters of the node.
        """
        slowest = 0.0
        if self.ranks > self.nodes and self.inside is not None:
            inside = bus_bytes_per_s(self.inside)
            if self.inside.peer_bytes_per_s is not None:  # a mesh: one link to each other rank of the node
                others = self.ranks // self.nodes - 1
                share = inside / self.inside.bytes_per_s
                inside = min(inside, self.inside.peer_bytes_per_s * others * share)
            slowest = 1 / inside
        if self.nodes > 1:
            slowest = max(slowest, 1 / (bus_bytes_per_s(self.between) * (self.ranks // self.nodes)))
        return slowest


def all_gather_s(n_bytes: float, group: Group) -> float:
    """Seconds of an all-gather or reduce-scatter of `n_bytes` in total. Each rank sends (n - 1) / n of them over n - 1 hops."""
    n = group.ranks
    if n == 1 or not n_bytes:
        return 0.0
    return COLLECTIVE_START_S + n_bytes * (n - 1) / n * group.seconds_per_byte + group.hop_s


def all_reduce_s(n_bytes: float, group: Group, *, messages: float = 1) -> float:
    """Seconds of an all-reduce of `n_bytes` in `messages` messages: a reduce-scatter and an all-gather. Between many nodes NCCL's
    trees save hops.
    """
    n = group.ranks
    if n == 1 or not n_bytes:
        return 0.0
    inside = 0.0 if group.inside is None else latency_s(group.inside)
    tree = 2 * ((n // group.nodes - 1) * inside + ceil(log2(group.nodes)) * latency_s(group.between))
    hops = min(2 * group.hop_s, tree) if group.nodes > 1 else 2 * group.hop_s
    return messages * (COLLECTIVE_START_S + hops) + 2 * n_bytes * (n - 1) / n * group.seconds_per_byte
