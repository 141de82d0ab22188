"""Attributes each live storage of a snapshot to a category and to the line of code that allocated it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_advisor.diagnosis.facts import Category, Holding, Moment
from fsdp_advisor.diagnosis.modules import class_of
from fsdp_advisor.diagnosis.replay import NEVER, Alive, Live
from fsdp_advisor.diagnosis.snapshot import ALLOC, NO_STACK, OOM, Trace
from fsdp_advisor.diagnosis.stacks import AllocationSite
from fsdp_advisor.diagnosis.steps import NO_LAYER, Region, Steps
from fsdp_advisor.memory.libraries import LARGE_WORKSPACE, SMALL_WORKSPACE, WORKSPACES

EARLIER_STEP = "kept from an earlier step: "
"""The prefix of a holding's place if none of its tensors was allocated in the current step."""
_WORKSPACE_BYTES = (SMALL_WORKSPACE, LARGE_WORKSPACE)
_OF_THE_STEP = ("activations", "loss", "temporaries")
_IN_MODULES = ("activations", "loss")
_MANY = 8
"""The least number of tensors from one line with which they are taken for parameters. A batch has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of a snapshot: a trace, the allocation site of each of its stacks, its steps, and the storages alive at the explained
    moment.

    `freed`: for each event, the event that frees its storage (`replay.lifetimes`). `failed`: whether the moment is an out-of-memory error
    instead of a peak. Frees after an error are ignored, because Python frees tensors while it unwinds.
    """

    trace: Trace
    sites: Sequence[AllocationSite]
    steps: Steps
    alive: Alive
    freed: Sequence[int]
    failed: bool

    @property
    def last(self) -> int:
        """The event that decides the phase: the failed allocation, or the one that reached the peak."""
        return self.alive.at if self.failed else max(self.alive.at - 1, 0)


def holdings(evidence: Evidence) -> tuple[Holding, ...]:
    """Every live storage by category and place, the largest first."""
    groups: defaultdict[tuple[Category, str, str], list[int]] = defaultdict(list)
    attribute = _Attribution(evidence)
    for item in evidence.alive.live:
        groups[attribute.of(item)].append(item.n_bytes)
    found = (
        Holding(
            category=category,
            module=module,
            where=where,
            n_bytes=sum(sizes),
            count=len(sizes),
            largest_bytes=max(sizes),
        )
        for (category, module, where), sizes in groups.items()
    )
    return tuple(sorted(found, key=lambda holding: -holding.n_bytes))


def by_category(found: Iterable[Holding]) -> dict[Category, int]:
    """Bytes by category."""
    totals: Counter[Category] = Counter()
    for holding in found:
        totals[holding.category] += holding.n_bytes
    return dict(totals)


def moment(evidence: Evidence) -> Moment:
    """The moment in the step that the diagnosis explains."""
    trace, steps = evidence.trace, evidence.steps
    if not len(trace):
        return Moment(phase="unknown")
    last = min(evidence.last, len(trace) - 1)
    site = evidence.sites[trace.stacks[last]] if trace.actions[last] in (ALLOC, OOM) else None
    where = site.where if site and (site.code or site.phase != "backward") else ""
    region = steps.at(last)
    if region is None:
        return Moment(phase="unknown", where=where)
    if region.phase == "backward":
        layer = _layer_in_backward(evidence, region, last)
    else:
        layer = next((n for n in reversed(steps.layers[region.first : last + 1]) if n), NO_LAYER)
    if region.phase == "backward" and not layer:
        where = where or "its start"
    return Moment(
        phase=region.phase,
        layer=layer or None,
        layers=steps.n_layers if layer else None,
        step=None if region.phase == "loading" else region.step,
        where=where,
    )


def _layer_in_backward(evidence: Evidence, region: Region, last: int) -> int:
    """The layer that is being recomputed, or else the lowest layer of which backward has freed an activation."""
    layers = evidence.steps.layers
    recomputed = next((n for n in reversed(layers[region.first : last + 1]) if n), NO_LAYER)
    if recomputed:
        return recomputed
    first = next(r.first for r in evidence.steps.regions if r.step == region.step)
    freed = evidence.freed
    begun = (layers[at] for at in range(first, region.first) if layers[at] and region.first <= freed[at] < last)
    return min(begun, default=NO_LAYER)


class _Attribution:
    """Decides the category of each storage."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._now = evidence.steps.at(evidence.last)
        self._made_before_forward = next((r.first for r in evidence.steps.regions if r.phase != "loading"), 0)
        made = {evidence.trace.stacks[at] for at, action in enumerate(evidence.trace.actions) if action == ALLOC}
        self._optimizer_recorded = any(evidence.sites[stack].category == "optimizer" for stack in made)
        self._of_size = Counter(item.n_bytes for item in evidence.alive.live)
        self._times = Counter(item.stack for item in evidence.alive.live)
        self._sizes: dict[Category, set[int]] = {"parameters": set(), "loss": set()}
        for item in evidence.alive.live:
            site = evidence.sites[item.stack]
            category: Category = "parameters" if self._is_parameter(item, site) else site.category
            if item.stack != NO_STACK and category in self._sizes:
                self._sizes[category].add(item.n_bytes)

    def of(self, item: Live) -> tuple[Category, str, str]:
        """The category of a storage, and the module and the place in the code that allocated it."""
        if item.event is None and item.stack == NO_STACK:
            if item.freed == NEVER and self._optimizer_recorded:  # made before the first step and never freed
                return "parameters", "", "allocated before recording began"
            return "unattributed", "", "allocated before recording began, or its event was dropped"
        site = self._evidence.sites[item.stack]
        if self._is_workspace(item, site):
            return "libraries", "", "cuBLAS workspace"
        if item.event is None:
            return site.kept, "", site.where
        region = self._evidence.steps.at(item.event)
        category = self._category(item, site, region)
        where = site.where
        if region and self._now and region.step < self._now.step and category in _OF_THE_STEP:
            where = EARLIER_STEP + where
        return category, _module(site) if category in _IN_MODULES else "", where

    def _is_workspace(self, item: Live, site: AllocationSite) -> bool:
        """Whether the storage may be a cuBLAS workspace, judged without C++ frames: there are as many of its size as threads."""
        if item.n_bytes not in _WORKSPACE_BYTES or item.freed != NEVER:
            return False
        return site.category in ("activations", "temporaries") and self._of_size[item.n_bytes] <= WORKSPACES

    def _is_parameter(self, item: Live, site: AllocationSite) -> bool:
        """Whether the storage is a parameter: a script's own code allocated many like it before the first forward, and it is never
        freed.
        """
        if item.event is None or site.category != "other" or item.freed != NEVER:
            return False
        return item.event < self._made_before_forward and self._times[item.stack] >= _MANY

    def _category(self, item: Live, site: AllocationSite, region: Region | None) -> Category:
        """The category of a storage. One that outlives its phase gets the site's `kept` category (gradient, optimizer state); others
        are temporaries.
        """
        if self._is_parameter(item, site):
            return "parameters"
        if site.casts and 2 * item.n_bytes in self._sizes["parameters"]:
            return "unsharded_parameters"
        if region is None or site.category == site.kept:
            return site.category
        if self._now is not None and region.first < self._now.first:
            return site.kept
        if site.kept == "gradients":
            if item.n_bytes in self._sizes["parameters"]:
                return "gradients" if self._evidence.failed or _outlives(item, region) else site.category
            if item.n_bytes in self._sizes["loss"] and site.category == "temporaries":
                return "loss"
        if not self._evidence.failed and _outlives(item, region):
            return site.kept
        return site.category


def _module(site: AllocationSite) -> str:
    """The class of the nearest method in a stack; empty if no file is on this machine."""
    return next((name for name in map(class_of, site.code) if name), "")


def _outlives(item: Live, region: Region) -> bool:
    return item.freed == NEVER or item.freed >= region.end
