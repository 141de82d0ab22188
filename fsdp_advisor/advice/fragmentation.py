"""The allocator's word: a plan is walked through the caching allocator, and what this reserves must fit the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.estimator import walked
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.plan import Plan
from fsdp_advisor.resolve import Resolved
from fsdp_advisor.units import format_gib

EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The setting that is tried where PyTorch's own leave too much unused."""

MOST_WALKS = 12
"""Through the caching allocator for one recommendation, and as many again for what would fit where nothing does. Each takes
20 (7B) to 130 ms (405B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """What the caching allocator comes to under its settings `allocator_conf` (None: PyTorch's own).

    `beside_bytes` is the middle of what CUDA and NCCL take, `room_bytes` what is left of the GPU's memory for the allocator.
    """

    allocator_conf: str | None
    reserved_bytes: int
    beside_bytes: int
    room_bytes: int
    fits: bool

    @property
    def device_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes

    @property
    def memory_bytes(self) -> int:
        return self.room_bytes + self.beside_bytes

    @property
    def numbers(self) -> str:
        """Both sides: what is reserved and what there is."""
        beside = f"{format_gib(self.reserved_bytes)} reserved and {format_gib(self.beside_bytes)} for CUDA and NCCL"
        return f"{beside}, of {format_gib(self.memory_bytes)}"

    @property
    def said(self) -> str:
        """The same, with the settings that make it so."""
        return self.numbers + (f", with {self.allocator_conf}" if self.allocator_conf else "")


@dataclass(slots=True)
class Allocator:
    """Walks through the caching allocator, of which there are to be at most `most`; a server answers with them too."""

    allocator_conf: str | None = None
    most: int = MOST_WALKS
    walks: int = 0

    def allow(self, more: int = MOST_WALKS) -> None:
        """At least as many more from here on."""
        self.most = max(self.most, self.walks + more)

    @property
    def settings(self) -> tuple[str | None, ...]:
        """PyTorch's own, then what helps where they leave too much unused; or what was asked for alone."""
        return (self.allocator_conf,) if self.allocator_conf else (None, EXPANDABLE_SEGMENTS)

    def through(
        self, model: Resolved, plan: Plan, gpu: Gpu, settings: Sequence[str | None]
    ) -> tuple[Fragmentation, ...]:
        """A plan under one of the settings after the other, until it fits: the last does, or none. Empty: no walks are left."""
        found: list[Fragmentation] = []
        if self.walks + len(settings) > self.most:
            return ()
        for conf in settings:
            self.walks += 1
            found.append(_walk(model, plan, gpu, conf))
            if found[-1].fits:
                break
        return tuple(found)


def _walk(model: Resolved, plan: Plan, gpu: Gpu, conf: str | None) -> Fragmentation:
    beside = device_overhead(gpu, plan).middle_bytes
    reserved = walked(model, plan, gpu, AllocatorConf.parse(conf) if conf else AllocatorConf())
    return Fragmentation(
        allocator_conf=conf,
        reserved_bytes=reserved.reserved_peak_bytes,
        beside_bytes=beside,
        room_bytes=gpu.memory_bytes - beside,
        fits=reserved.verdict == "fits",
    )
