"""PyTorch's CUDA caching allocator: what a job's steps reserve, and whether they run within a GPU's memory."""

from fsdp_advisor.memory.allocator.caching import CachingAllocator, OutOfMemory, Segment
from fsdp_advisor.memory.allocator.conf import AllocatorConf
from fsdp_advisor.memory.allocator.operations import StepOperations, step_operations
from fsdp_advisor.memory.allocator.simulation import AllocatorResult, Refused, Verdict, simulate_allocator

__all__ = [
    "AllocatorConf",
    "AllocatorResult",
    "CachingAllocator",
    "OutOfMemory",
    "Refused",
    "Segment",
    "StepOperations",
    "Verdict",
    "simulate_allocator",
    "step_operations",
]
