"""Allocated bytes over time, from PyTorch's own history of allocations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

POINTS = 240


def timeline(torch: ModuleType) -> list[list[int]]:
    """Points of [microseconds since the first, bytes], at most POINTS: the highest of equal parts of the history.

    Bytes are those that tensors requested, as PyTorch's history has them: the allocator's rounding is not included.
    """
    history = torch._C._cuda_memorySnapshot(None)["device_traces"]
    events: list[dict[str, Any]] = max(history, key=len, default=[])
    points: list[list[int]] = []
    alive = 0
    for event in events:
        if event["action"] == "alloc":
            alive += event["size"]
        elif event["action"] == "free_completed":
            alive -= event["size"]
        else:
            continue
        points.append([event["time_us"], alive])
    if not points:
        return []
    size = -(-len(points) // POINTS)
    start = points[0][0]
    highest = (max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size))
    return [[time_us - start, alive] for time_us, alive in highest]
