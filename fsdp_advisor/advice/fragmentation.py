"""The allocator's word: a plan is walked through the caching allocator, and what this reserves must leave the margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_advisor.estimator import walked
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.units import format_gib

EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The setting that is tried where PyTorch's own leave too much unused."""
SELDOM_MORE = 0.05
"""With expandable segments less is reserved; of 236 plans of eight models 9 reserved more, 7 of them by less than this part."""

MOST_WALKS = 12
"""Through the caching allocator for one recommendation, and as many again for what would fit where nothing does. Each takes
20 (7B) to 130 ms (405B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """What the caching allocator comes to under its settings `allocator_conf` (None: PyTorch's own).

    `beside_bytes` is the middle of what CUDA and NCCL take, `available_bytes` what both may take together: the GPU's memory
    less the margin. What fits is within that, and its steps run without asking the driver twice.
    """

    allocator_conf: str | None
    reserved_bytes: int
    beside_bytes: int
    available_bytes: int
    fits: bool

    @property
    def device_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes

    @property
    def room_bytes(self) -> int:
        """What is left for the allocator."""
        return self.available_bytes - self.beside_bytes

    def beyond(self, part: float) -> bool:
        """Whether it is too much even if so large a part less were reserved."""
        return self.reserved_bytes > (1 + part) * self.room_bytes

    @property
    def numbers(self) -> str:
        """Both sides: what is needed and what there is."""
        parts = f"{format_gib(self.reserved_bytes)} reserved, {format_gib(self.beside_bytes)} for CUDA and NCCL"
        return f"needs {format_gib(self.device_bytes)} ({parts}), has {format_gib(self.available_bytes)}"

    @property
    def said(self) -> str:
        """The same, with the settings that make it so."""
        return self.numbers + (f", with {self.allocator_conf}" if self.allocator_conf else "")


@dataclass(slots=True)
class Allocator:
    """Walks through the caching allocator, of which there are to be at most `most`; a server answers with them too.

    What was walked is remembered.
    """

    allocator_conf: str | None = None
    most: int = MOST_WALKS
    walks: int = 0
    _found: dict[tuple[Plan, Gpu, int, str | None], Fragmentation] = field(default_factory=dict)

    def allow(self, more: int = MOST_WALKS) -> None:
        """At least as many more from here on."""
        self.most = max(self.most, self.walks + more)

    @property
    def settings(self) -> tuple[str | None, ...]:
        """PyTorch's own, then what helps where they leave too much unused; or what was asked for alone."""
        return (self.allocator_conf,) if self.allocator_conf else (None, EXPANDABLE_SEGMENTS)

    @property
    def leanest(self) -> tuple[str | None, ...]:
        """The same, first what reserves least: what is far from fitting takes one walk."""
        return self.settings[::-1]

    def through(
        self, model: Resolved, plan: Plan, gpu: Gpu, available_bytes: int, settings: Sequence[str | None]
    ) -> tuple[Fragmentation, ...]:
        """A plan under one of the settings after the other, until it fits: the last does, or none. Empty: no walks are left."""
        found: list[Fragmentation] = []
        for conf in settings:
            key = (plan, gpu, available_bytes, conf)
            if key not in self._found:
                if self.walks >= self.most:
                    break
                self.walks += 1
                self._found[key] = _walk(model, plan, gpu, available_bytes, conf)
            found.append(self._found[key])
            if found[-1].fits or (conf == EXPANDABLE_SEGMENTS and found[-1].beyond(SELDOM_MORE)):
                break
        return tuple(found)


def _walk(model: Resolved, plan: Plan, gpu: Gpu, available_bytes: int, conf: str | None) -> Fragmentation:
    parsed = AllocatorConf.parse(conf) if conf else AllocatorConf()
    reserved = walked(model, plan, gpu, parsed, available_bytes=available_bytes)
    return Fragmentation(
        allocator_conf=conf,
        reserved_bytes=reserved.reserved_peak_bytes,
        beside_bytes=device_overhead(gpu, plan).middle_bytes,
        available_bytes=available_bytes,
        fits=reserved.verdict == "fits",
    )
