"""The parameters that DeepSpeed ZeRO-3 gathers, module by module, and when it frees them.

Stage 3 does not gather whole layers. Each module's hook gathers the module's own parameters, waits for them, and then
prefetches the parameters of the next modules: at least ``stage3_prefetch_bucket_size`` elements *at every hook*, in
addition to all-gathers under way, up to ``stage3_max_live_parameters``. A module's parameters stay after use if they are
used again within ``stage3_max_reuse_distance`` elements. So with the defaults up to 1e9 elements are alive, and the
parameters of a model with fewer than about 5e8 are never freed between forward and backward.

Source: zero/partitioned_param_coordinator.py (DeepSpeed 0.19.8); zero/partition_parameters.py, all_gather_coalesced.

This is the steady state: from the second micro-batch on DeepSpeed has a complete trace of the modules. In two cases no trace is ever valid:
if forwards with and without adapters alternate, because the reference is the model without its adapters; and if the model generates,
because TRL removes the modules' hooks meanwhile. With KTO the trace has only the forward of mismatched completions, and is valid for the
next one, but not for backward. Without a trace nothing is prefetched, and each module frees its parameters after use. Two kinds stay
longer. One is the head's weight (`is_external_param`): TRL's loss reads it outside of its module, so the hook of the whole model gathers it
first and no hook frees it. The other is frozen weights of a checkpointed layer, which belong to the layer's backward from its recomputation
on (`update_recompute_parameters`). If the model runs without its adapters between forward and backward, they stay until backward ends
(`release_backward_leftovers`).

Modules are derived from the parameters' names. Modules without parameters (an activation, a dropout) are therefore not modelled; their
hooks prefetch too, which only makes the prefetch earlier.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import DEFAULTS, Settings, offloads_parameters
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import cast_bytes
from fsdp_advisor.program.storages import round_up


class GatherChange(NamedTuple):
    """The allocation of a storage of `n_bytes`, or its free: then `n_bytes` is 0."""

    storage: int
    n_bytes: int


class GatherVisit(NamedTuple):
    """One unit's part of a micro-batch. The root has a visit for its modules before each stack, and one for those after the last.

    `rising` are the allocations and frees up to the peak of gathered parameters, `falling` those after the peak.
    `gathered_bytes` are the bytes of all parameters whose all-gather begins in this visit.
    """

    unit: UnitId
    rising: tuple[GatherChange, ...] = ()
    falling: tuple[GatherChange, ...] = ()
    gathered_bytes: int = 0


class Gathered(NamedTuple):
    """The visits of a micro-batch in order, and the frees at its end. Persistent parameters belong to the states and are
    not included.
    """

    forward: tuple[GatherVisit, ...]
    backward: tuple[GatherVisit, ...]
    end: tuple[GatherChange, ...] = ()


class _Use(NamedTuple):
    """A step that uses a parameter."""

    parameter: int
    step: int


class _Group(NamedTuple):
    """An all-gather: the allocation of its buffer, and its parameters that no hook has waited for."""

    buffer: GatherChange
    unused: list[int]


@dataclass(slots=True)
class _Fetcher:
    """The allocations of DeepSpeed's PartitionedParameterCoordinator. A step is one module's hook. `order` contains the
    indices of each step's parameters.
    """

    elements: list[int]
    order: list[tuple[int, ...]]
    traversed: list[int]  # by step: elements of all earlier steps, persistent parameters included
    uses: list[list[int]]  # by parameter: the steps that use it
    ranks: int
    element_bytes: list[int]  # by parameter
    offloaded: bool
    traced_steps: int
    kept: Container[int]  # the parameters that no module's hook frees if there is no trace
    settings: Settings
    uses_in_order: list[_Use] = field(default_factory=list)
    next_use: int = 0
    step: int = 0
    gathers: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0  # of this visit, as the next two are
    changes_to_peak: int = 0
    changes: list[GatherChange] = field(default_factory=list)
    storages: int = 0  # allocated so far
    available_elements: int = 0
    gathered_bytes: int = 0  # since the last `begin_visit`
    available: dict[int, GatherChange] = field(default_factory=dict)  # parameter -> its allocation
    under_way: dict[int, int] = field(default_factory=dict)  # parameter that is being gathered -> its group
    groups: dict[int, _Group] = field(default_factory=dict)
    fetched_for: dict[int, int] = field(default_factory=dict)  # parameter -> the last step that it was fetched for

    def __post_init__(self) -> None:
        traced = self.order[: self.traced_steps]
        self.uses_in_order = [_Use(p, step) for step, parameters in enumerate(traced) for p in parameters]

    @property
    def traced(self) -> bool:
        """Whether the trace has the module whose hook runs."""
        return self.step <= self.traced_steps

    def begin_visit(self) -> None:
        self.changes, self.changes_to_peak, self.peak_bytes, self.gathered_bytes = [], 0, self.live_bytes, 0

    def _allocate(self, n_bytes: int) -> GatherChange:
        allocation = GatherChange(self.storages, n_bytes)
        self.storages += 1
        self.changes.append(allocation)
        self.live_bytes += round_up(n_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.changes_to_peak = self.live_bytes, len(self.changes)
        return allocation

    def _free(self, allocation: GatherChange) -> None:
        self.changes.append(GatherChange(allocation.storage, 0))
        self.live_bytes -= round_up(allocation.n_bytes)

    def _gather(self, parameters: list[int]) -> None:
        """Start an all-gather of `parameters`, which are indices into `elements`. A single parameter becomes a view of the buffer; several
        share a buffer and are copied out of it when a hook waits for them.
        """
        if not parameters:
            return
        elements = sum(self.elements[p] for p in parameters)
        self.available_elements += elements
        self.gathered_bytes += sum(self.element_bytes[p] * self.elements[p] for p in parameters)
        shards = [self.element_bytes[p] * shard_elements(self.elements[p], self.ranks) for p in parameters]
        self.groups[self.gathers] = _Group(self._allocate(self.ranks * sum(shards)), list(parameters))
        if self.offloaded:  # each shard is first copied from the host
            for shard in [self._allocate(n_bytes) for n_bytes in shards]:
                self._free(shard)
        self.under_way.update(dict.fromkeys(parameters, self.gathers))
        self.gathers += 1

    def _wait(self, parameter: int) -> None:
        number = self.under_way.pop(parameter, None)
        if number is None:
            return
        group = self.groups[number]
        if len(group.unused) == 1 and parameter not in self.available:
            self.available[parameter] = group.buffer
            del self.groups[number]
            return
        if parameter not in self.available:
            for p in group.unused:
                self.available[p] = self._allocate(self.element_bytes[p] * self.elements[p])
        group.unused.remove(parameter)
        if not group.unused:
            self._free(group.buffer)
            del self.groups[number]

    def fetch(self) -> tuple[int, ...]:
        """Run the hook before a module, and return the indices of the module's parameters. Source: _fetch_sub_module_impl."""
        wanted, step = self.order[self.step], self.step
        self._gather([p for p in wanted if p not in self.available and p not in self.under_way])
        for p in wanted:
            self._wait(p)
        self.step += 1
        if self.traced:
            self._prefetch(wanted, step)
        return wanted

    def _prefetch(self, wanted: tuple[int, ...], step: int) -> None:
        """Start the all-gather of the parameters that follow `wanted`, those of this step."""
        for _ in [p for p in wanted if self.fetched_for.get(p, -1) < step]:
            use = self.uses_in_order[self.next_use]
            self.next_use += 1
            self.fetched_for[use.parameter] = use.step
        room = min(self.settings.max_live_parameters - self.available_elements, self.settings.prefetch_bucket_size)
        ahead: list[int] = []
        elements = 0
        while self.next_use < len(self.uses_in_order) and elements < room:
            p, used_at = self.uses_in_order[self.next_use]
            self.next_use += 1
            self.fetched_for[p] = max(self.fetched_for.get(p, -1), used_at)
            if p not in self.available and p not in self.under_way and p not in ahead:
                ahead.append(p)
                elements += self.elements[p]
        self._gather(ahead)

    def release(self, parameters: Iterable[int]) -> None:
        """Run the hook after a module. Source: release_sub_module, __params_to_release."""
        for p in parameters:
            if not (p in self.kept or (self.traced and self._is_used_soon(p))):
                self._release(p)

    def _is_used_soon(self, p: int) -> bool:
        if self.fetched_for.get(p, -1) > self.step:
            return True
        following = next((step for step in self.uses[p] if step >= self.step), None)
        return (
            following is not None
            and self.traversed[following] - self.traversed[self.step] < self.settings.max_reuse_distance
        )

    def _release(self, p: int) -> None:
        if p in self.available and p not in self.under_way:
            self._free(self.available.pop(p))
            self.available_elements -= self.elements[p]


def _modules(parameters: tuple[Parameter, ...], first: int) -> list[tuple[int, ...]]:
    """The modules of a unit in order, each as the indices of its own parameters. A container comes before its modules."""
    modules: dict[str, list[int]] = {"": []}
    for index, parameter in enumerate(parameters, start=first):
        parts = parameter.name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), [])
        modules[".".join(parts)].append(index)
    return [tuple(own) for own in modules.values()]


Turn = tuple[UnitId, list[tuple[int, ...]]]
"""A unit, and the modules in it in the order of their hooks. A module is given by the indices of its own parameters."""


@dataclass(frozen=True, slots=True)
class _Inventory:
    """A model's parameters in forward order. A shared parameter counts once."""

    units: list[Turn] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    element_bytes: list[int] = field(default_factory=list)
    of_head: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def add(self, unit_id: UnitId, parameters: tuple[Parameter, ...], plan: Plan) -> None:
        first = len(self.elements)
        self.units.append((unit_id, _modules(parameters, first)))
        of_head = (p.role == "head" or (p.role == "embedding" and bool(p.tied)) for p in parameters)
        self.of_head.extend(itertools.compress(itertools.count(first), of_head))
        self.elements.extend(p.elements for p in parameters)
        self.trained.extend(p.trainable for p in parameters)
        self.element_bytes.extend(cast_bytes(plan, p) for p in parameters)

    def with_head_first(self) -> list[Turn]:
        """The units in forward order if the head's weight belongs to the whole model's module, whose hook runs first."""
        (unit_id, (first, *modules)), *others = self.units
        return [
            (unit_id, [(*first, *(p for p in self.of_head if p not in first)), *self._without_head(modules)]),
            *((other, self._without_head(own)) for other, own in others),
        ]

    def _without_head(self, modules: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [tuple(p for p in own if p not in self.of_head) for own in modules]

    def with_backward(self, plan: Plan) -> list[Turn]:
        """The units with the modules that have a backward: those from the first trained parameter on. The hook before a module's backward
        is on outputs that require a gradient, as the embedding's do if layers are checkpointed.

        Modules next to the first trained one, such as the keys of the same attention, count as having a backward.
        Source: runtime/zero/parameter_offload.py, _register_deepspeed_module, _pre_backward_module_hook.
        """
        if plan.checkpointing not in ("none", "every") or plan.framework == "axolotl":
            return self.units
        found: list[Turn] = []
        learns = False
        for unit_id, modules in self.units:
            kept = []
            for own in modules:
                learns = learns or any(self.trained[p] for p in own)
                if learns:
                    kept.append(own)
            if 0 < len(kept) < len(modules) and not modules[0]:
                kept.insert(0, modules[0])  # the layer itself
            found.append((unit_id, kept))
        return found


def gathered(
    profile: Profile,
    plan: Plan,
    settings: Settings = DEFAULTS,
    *,
    forward_only: bool = False,
    holds_head: bool = False,
    idle: Container[int] = (),
) -> Gathered:
    """The gathered parameters over one micro-batch, unit by unit.

    `forward_only`: no backward follows, so no parameters stay for it. `holds_head`: a forward before may have gathered the head's weight,
    which then stays if no module's hook frees it. `idle`: stacks whose layers do not run.
    """
    if plan.shard_degree == 1 and not offloads_parameters(plan):
        settings = Settings(param_persistence_threshold=profile.parameters)  # a single rank uses its shards directly
    inventory = _inventory(profile, plan, idle)
    head_first = plan.loss_code == "trl" and not _is_traced(plan)
    forward = inventory.with_head_first() if head_first else inventory.units
    turns = [*forward, *([] if forward_only else _backward(inventory.with_backward(plan), plan))]
    fetcher = _fetcher(inventory, turns, plan, settings, holds_head=holds_head)
    visits = []
    forwards, first_root = len(inventory.units), len(turns) - (not forward_only)
    for turn, (unit_id, modules) in enumerate(turns):
        fetcher.begin_visit()
        recomputes = turn >= forwards and not unit_id.is_outside_layers and plan.checkpointing != "none"
        stays: set[int] = set()
        for _ in modules:
            own = fetcher.fetch()
            if recomputes and not fetcher.traced:
                stays.update(p for p in own if not inventory.trained[p])
            if turn < first_root:  # the embedding's backward hook never fires: freed at the end of backward
                fetcher.release(p for p in own if p not in stays)
        if not _forwards_again(plan):
            fetcher.release(stays)
        changes, to_peak = fetcher.changes, fetcher.changes_to_peak
        rising, falling = tuple(changes[:to_peak]), tuple(changes[to_peak:])
        visits.append(GatherVisit(unit_id, rising, falling, fetcher.gathered_bytes))
    left = [*fetcher.available.values(), *(group.buffer for group in fetcher.groups.values())]
    end = tuple(GatherChange(allocation.storage, 0) for allocation in left)
    return Gathered(tuple(visits[:forwards]), tuple(visits[forwards:]), end)


def _inventory(profile: Profile, plan: Plan, idle: Container[int]) -> _Inventory:
    """The parameters of the root's modules before each stack that is not idle, of its layers, and of the root's other modules."""
    found = _Inventory()
    tied: dict[str, int] = {}  # other name of a tied parameter of the root -> its index
    root, done = profile.root.parameters, 0
    for s, (stack, before) in enumerate(zip(profile.stacks, profile.order, strict=True)):
        if s in idle:  # nothing runs between the root's modules before and after it
            continue
        tied.update((name, len(found.elements) + i) for i, p in enumerate(root[done:before]) for name in p.tied)
        found.add(AT_ROOT, root[done:before], plan)
        done = before
        for layer in stack.recorded_order:
            found.add(UnitId(s, layer), stack.units[layer].parameters, plan)
    found.add(AT_ROOT, root[done:], plan)
    found.units[-1][1].extend((index,) for index in tied.values())  # a head tied to the embedding
    return found


def _backward(units: list[Turn], plan: Plan) -> Iterator[Turn]:
    """The units in the order of backward, each with its modules (a turn). A checkpointed layer's modules are first fetched in forward
    order.
    """
    layers = sum(not unit_id.is_outside_layers for unit_id, _ in units)
    for unit_id, modules in reversed(units):
        is_layer = not unit_id.is_outside_layers
        layers -= is_layer
        back = [*modules[:1], *modules[:0:-1]] if is_layer else modules[::-1]
        yield unit_id, (modules + back if is_layer and plan.checkpoints(layers) else back)


def _forwards_again(plan: Plan) -> bool:
    """Whether the model runs without its adapters between a forward and its backward."""
    return plan.reference == "adapters-off" and plan.task != "grpo"


def _steps_traced(plan: Plan, forward: int, step: int) -> int:
    """The number of modules that a valid trace has at a step's begin, of all `step` modules; `forward` of them run in its forward.

    With KTO it is recorded in the forward of mismatched completions, where there is none, and ends before the step's backward.
    """
    if plan.task == "kto":
        return forward if forward < step else 0
    return step if _is_traced(plan) else 0


def _is_traced(plan: Plan) -> bool:
    """Whether the trace of modules is valid in all of a step."""
    generates = plan.generation is not None and plan.generation.generator == "transformers"
    return not (generates or plan.task == "kto" or plan.reference == "adapters-off")


def _fetcher(inventory: _Inventory, turns: list[Turn], plan: Plan, settings: Settings, *, holds_head: bool) -> _Fetcher:
    """The coordinator before the first turn. Parameters below the persistence threshold stay on the GPU and are not fetched."""
    elements = inventory.elements
    hooks = [own for _, modules in turns for own in modules]
    traversed = [0, *itertools.accumulate(sum(elements[p] for p in own) for own in hooks)]
    forward = sum(len(modules) for _, modules in inventory.units)
    traced = _steps_traced(plan, forward, len(hooks))
    kept = inventory.of_head if plan.loss_code == "trl" and traced < len(hooks) else []
    held = kept if holds_head else []
    order = [
        tuple(p for p in own if elements[p] > settings.param_persistence_threshold and p not in held) for own in hooks
    ]
    uses: list[list[int]] = [[] for _ in elements]
    for step, own in enumerate(order):
        for p in own if step < traced else ():
            uses[p].append(step)
    return _Fetcher(
        elements=elements,
        order=order,
        traversed=traversed,
        uses=uses,
        ranks=plan.shard_degree,
        element_bytes=inventory.element_bytes,
        offloaded=offloads_parameters(plan),
        traced_steps=traced,
        kept=kept,
        settings=settings,
    )
