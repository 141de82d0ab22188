"""Divides a trace into steps, phases and layers.

A stack does not show which layer runs, because all layers run the same lines. So layers are counted. In one forward the loop over the
layers is the outermost line whose first allocation occurs again, and each occurrence begins a layer. Recomputation under activation
checkpointing visits the layers in reverse. Without it, backward is at the layer whose activations were freed last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_advisor.diagnosis.facts import MomentPhase
from fsdp_advisor.diagnosis.snapshot import ALLOC, OOM, Frame, Trace
from fsdp_advisor.diagnosis.stacks import AllocationSite

NO_LAYER = 0
Path = tuple[Frame, ...]
"""Lines of code outside of PyTorch, the outermost first."""


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive events of one phase: `first` up to and excluding `end`. `step` counts from 1."""

    phase: MomentPhase
    first: int
    end: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The regions of a trace, the layer of each event (NO_LAYER: none), and the number of layers, if it is known."""

    regions: tuple[Region, ...]
    layers: array[int]
    n_layers: int | None

    def at(self, event: int) -> Region | None:
        """The region of an event; None before the first one."""
        found = None
        for region in self.regions:
            if region.first > event:
                break
            found = region
        return found


def steps_of(trace: Trace, sites: Sequence[AllocationSite]) -> Steps:
    """The steps of a trace."""
    regions = tuple(_regions(trace, sites))
    layers = array("H", bytes(2 * len(trace)))
    n_layers: int | None = None
    for region in regions:
        if region.phase == "forward":
            count = _number_layers(trace, region, sites, layers, recomputed=False)
            complete = any(other.first >= region.end and other.phase in ("loss", "backward") for other in regions)
            if count > 1 and complete:
                n_layers = max(n_layers or 0, count)
    for region in regions:
        if region.phase == "backward" and n_layers:
            count = _number_layers(trace, region, sites, layers, recomputed=True)
            if count:
                _reverse(layers, region, n_layers)
    return Steps(regions=regions, layers=layers, n_layers=n_layers)


def _regions(trace: Trace, sites: Sequence[AllocationSite]) -> Iterator[Region]:
    """Yield maximal runs of events with the same phase. An event of unknown phase belongs to the run before it."""
    phase: MomentPhase | None = None
    first, step = 0, 1
    for at, action in enumerate(trace.actions):
        if action not in (ALLOC, OOM):
            continue
        now = sites[trace.stacks[at]].phase
        if now in ("unknown", phase):
            continue
        if phase is not None:
            yield Region(phase, first, at, step)
            if phase == "optimizer":
                step += 1
        phase, first = now, at
    if phase is not None:
        yield Region(phase, first, len(trace), step)


def _number_layers(
    trace: Trace, region: Region, sites: Sequence[AllocationSite], layers: array[int], *, recomputed: bool
) -> int:
    """Number the layers of a region's events from 1, in order. Returns their number; 0 if no loop is found."""
    events = [
        (at, sites[trace.stacks[at]].code[::-1])
        for at in range(region.first, region.end)
        if trace.actions[at] in (ALLOC, OOM)
        and sites[trace.stacks[at]].recomputes == recomputed
        and sites[trace.stacks[at]].category == "activations"
    ]
    loop = _loop([path for _, path in events])
    if loop is None:
        return 0
    prefix, first = loop
    count, before = NO_LAYER, None
    for at, path in events:
        if path[: len(prefix)] == prefix:
            count += path == first and path != before
            layers[at] = count
        before = path
    return count


def _loop(paths: Sequence[Path]) -> tuple[Path, Path] | None:
    """The path to the line of the loop over layers, and the path with which each layer begins."""
    times: dict[Path, int] = {}
    for path, before in zip(paths, (None, *paths), strict=False):
        times[path] = times.get(path, 0) + (path != before)  # one line may allocate several times
    first_under: dict[Path, Path] = {}
    for path in times:  # in the order of their first occurrence
        for depth in range(1, len(path)):
            first_under.setdefault(path[:depth], path)
    for prefix, first in sorted(first_under.items(), key=lambda item: len(item[0])):
        if times[first] > 1:
            return prefix, first
    return None


def _reverse(layers: array[int], region: Region, n_layers: int) -> None:
    for at in range(region.first, region.end):
        if layers[at]:
            layers[at] = max(n_layers + 1 - layers[at], 1)
