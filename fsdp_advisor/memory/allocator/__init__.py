"""PyTorch's CUDA caching allocator: what a job's steps reserve, and whether they run within a GPU's memory."""

from fsdp_advisor.memory.allocator.caching import CachingAllocator, OutOfMemory, Segment
from fsdp_advisor.memory.allocator.conf import AllocatorConf
from fsdp_advisor.memory.allocator.reserve import AllocatorResult, Refused, Verdict, simulate_allocator, traced

__all__ = [
    "AllocatorConf",
    "AllocatorResult",
    "CachingAllocator",
    "OutOfMemory",
    "Refused",
    "Segment",
    "Verdict",
    "simulate_allocator",
    "traced",
]
