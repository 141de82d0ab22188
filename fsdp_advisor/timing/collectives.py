"""How long a collective takes: NCCL's rings over the links within a node and between nodes, in closed form.

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
    """The ranks of a collective: `ranks` of them on `nodes` nodes, evenly.

    A rank reaches its own node's others over `inside` and other nodes over `between`, its part of the node's adapters.
    """

    ranks: int
    nodes: int
    inside: Link | None
    between: Link

    @cached_property
    def hop_s(self) -> float:
        """All hops of one turn around the ring."""
        inside = 0.0 if self.inside is None else latency_s(self.inside)
        across = latency_s(self.between) * (self.nodes - 1)
        return (self.ranks - self.nodes) * inside + across

    @cached_property
    def seconds_per_byte(self) -> float:
        """Of the bytes that each rank sends: the slower of the two kinds of link holds up the ring.

        The rings of a node's ranks leave it in parallel, each through its own adapter: between nodes a rank has the
        adapters of its whole node for what all of them send.
        """
        slowest = 0.0
        if self.ranks > self.nodes and self.inside is not None:
            inside = bus_bytes_per_s(self.inside)
            if self.inside.peer_bytes_per_s is not None:  # a mesh: as many links as there are others in the node
                others = self.ranks // self.nodes - 1
                share = inside / self.inside.bytes_per_s
                inside = min(inside, self.inside.peer_bytes_per_s * others * share)
            slowest = 1 / inside
        if self.nodes > 1:
            slowest = max(slowest, 1 / (bus_bytes_per_s(self.between) * (self.ranks // self.nodes)))
        return slowest


def all_gather_s(n_bytes: float, group: Group) -> float:
    """All-gather or reduce-scatter of `n_bytes` in all: each rank sends (n - 1) / n of them, over n - 1 hops."""
    n = group.ranks
    if n == 1 or not n_bytes:
        return 0.0
    return COLLECTIVE_START_S + n_bytes * (n - 1) / n * group.seconds_per_byte + group.hop_s


def all_reduce_s(n_bytes: float, group: Group, *, messages: float = 1) -> float:
    """All-reduce of `n_bytes` in `messages`: a reduce-scatter and an all-gather; between many nodes NCCL's trees save hops."""
    n = group.ranks
    if n == 1 or not n_bytes:
        return 0.0
    inside = 0.0 if group.inside is None else latency_s(group.inside)
    tree = 2 * ((n // group.nodes - 1) * inside + ceil(log2(group.nodes)) * latency_s(group.between))
    hops = min(2 * group.hop_s, tree) if group.nodes > 1 else 2 * group.hop_s
    return messages * (COLLECTIVE_START_S + hops) + 2 * n_bytes * (n - 1) / n * group.seconds_per_byte
