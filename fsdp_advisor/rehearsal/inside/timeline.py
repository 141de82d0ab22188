"""Allocated bytes over time, from PyTorch's own history of allocations."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

POINTS = 240


def timeline(torch: ModuleType, before: Mapping[int, int]) -> list[list[int]]:
    """At most POINTS points [microseconds since the first, bytes] of the busiest GPU. Each is the highest of an equal part of the history.

    `before`: the bytes that were alive on each GPU when the history began.

    Bytes are those that tensors requested, without the allocator's rounding, because PyTorch's history records these.
    """
    history = torch._C._cuda_memorySnapshot(None)["device_traces"]
    device = max(range(len(history)), key=lambda index: len(history[index]), default=0)
    events: list[dict[str, Any]] = history[device] if history else []
    points: list[list[int]] = []
    alive = before.get(device, 0)
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
