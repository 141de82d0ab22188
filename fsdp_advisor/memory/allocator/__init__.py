"""PyTorch's CUDA caching allocator: the bytes that a job's steps reserve, and whether the steps fit a GPU's memory.

`step_operations` expands a step program into allocator operations, `simulate_allocator` and `completes` run them, `AllocatorConf.parse`
reads `PYTORCH_ALLOC_CONF`. May import `program`, `model` and `errors`.
"""

from fsdp_advisor.memory.allocator.caching import (
    AllocatorSegment,
    CachingAllocator,
    OutOfMemory,
    takes_newest_first,
)
from fsdp_advisor.memory.allocator.conf import DEFAULT_CONF, AllocatorConf
from fsdp_advisor.memory.allocator.job_operations import (
    StepOperations,
    with_evaluation,
    with_first_step,
    with_graph,
)
from fsdp_advisor.memory.allocator.operations import step_operations
from fsdp_advisor.memory.allocator.simulation import AllocatorResult, Verdict, completes, simulate_allocator

__all__ = [
    "DEFAULT_CONF",
    "AllocatorConf",
    "AllocatorResult",
    "AllocatorSegment",
    "CachingAllocator",
    "OutOfMemory",
    "StepOperations",
    "Verdict",
    "completes",
    "simulate_allocator",
    "step_operations",
    "takes_newest_first",
    "with_evaluation",
    "with_first_step",
    "with_graph",
]
