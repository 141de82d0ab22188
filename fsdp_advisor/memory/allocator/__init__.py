"""What PyTorch's caching allocator reserves for a job, and whether a GPU has it: arithmetic over every storage of a step."""

from fsdp_advisor.memory.allocator.caching import CachingAllocator, OutOfMemory, Segment
from fsdp_advisor.memory.allocator.conf import AllocatorConf
from fsdp_advisor.memory.allocator.reserve import Refused, Reserved, Verdict, reserve, traced

__all__ = [
    "AllocatorConf", "CachingAllocator", "OutOfMemory", "Refused", "Reserved", "Segment", "Verdict", "reserve", "traced",
]  # fmt: skip
