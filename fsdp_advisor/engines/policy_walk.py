"""Maps the hooks of layers and modules, and gradients, to the units of a wrap policy while a step is built."""

from __future__ import annotations

from collections import Counter

from fsdp_advisor.model.fsdp_units import UnitId, Units
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import ROOT
from fsdp_advisor.program.hooks import OrderInUnit

NO_UNIT = UnitId(ROOT, -1)
"""The unit of a hook at which FSDP does nothing."""


class OneUnitPerLayer:
    """The units without a policy: each hook belongs to the `UnitId` at which it fires, and engines ask for the gradients of a unit."""

    def begin(self) -> None:
        """A micro-batch begins."""

    def pre_forward(self, unit_id: UnitId) -> UnitId:
        return unit_id

    def post_forward(self, unit_id: UnitId) -> UnitId:
        return unit_id

    def pre_backward(self, unit_id: UnitId) -> UnitId:
        return unit_id

    def post_backward(self, unit_id: UnitId) -> UnitId:
        return unit_id

    def layer_done(self, unit_id: UnitId) -> None:
        """A layer's backward has ended."""

    def owner_of(
        self, unit_id: UnitId, number: int, parameter: int, at_root: bool
    ) -> tuple[UnitId, OrderInUnit] | None:
        """The unit of a parameter of the layer or of the root, and its position in the model; None if engines ask for gradients."""
        return None


class PolicyWalk(OneUnitPerLayer):
    """The units of a policy, by the position of a micro-batch in each stack.

    Each method takes the `UnitId` at which a hook fires, and returns the hook's unit or NO_UNIT.

    A group of layers is gathered before its first layer and freed after its last, and in backward the other way round.
    Source: torch.distributed.fsdp._fully_shard._fsdp_state (torch 2.13), _register_group_forward_hooks.
    """

    def __init__(self, profile: Profile, units: Units) -> None:
        self._units = units
        self._stack_of_root = [
            sum(end <= index for end in profile.order) for index in range(len(profile.root.parameters))
        ]
        self._depth = [stack.depth for stack in profile.stacks]
        # by stack, the layers whose forward has ended and whose backward has not
        self._passed: Counter[int] = Counter()

    def begin(self) -> None:
        self._passed.clear()

    def pre_forward(self, unit_id: UnitId) -> UnitId:
        return self._unit(unit_id, self._passed[unit_id.stack], first=True)

    def post_forward(self, unit_id: UnitId) -> UnitId:
        unit = self._unit(unit_id, self._passed[unit_id.stack], first=False)
        self._passed[unit_id.stack] += unit_id.is_layer
        return unit

    def pre_backward(self, unit_id: UnitId) -> UnitId:
        return self._unit(unit_id, self._passed[unit_id.stack] - 1, first=False)

    def post_backward(self, unit_id: UnitId) -> UnitId:
        return self._unit(unit_id, self._passed[unit_id.stack] - 1, first=True)

    def layer_done(self, unit_id: UnitId) -> None:
        self._passed[unit_id.stack] -= 1

    def _unit(self, unit_id: UnitId, number: int, *, first: bool) -> UnitId:
        if not unit_id.is_layer:
            return unit_id
        if not self._units.groups:
            return unit_id if unit_id in self._units.layers else NO_UNIT
        size, stack = self._units.group_size, unit_id.stack
        is_at_edge = number % size == 0 if first else (number + 1) % size == 0 or number + 1 == self._depth[stack]
        return self._units.groups[stack][number // size] if is_at_edge else NO_UNIT

    def owner_of(self, unit_id: UnitId, number: int, parameter: int, at_root: bool) -> tuple[UnitId, OrderInUnit]:
        if at_root:
            return self._units.owner_in_root[parameter], (2 * self._stack_of_root[parameter], 0, parameter)
        owner = self._units.owner_in_layer[unit_id][parameter]
        group = self._units.groups[unit_id.stack][number // self._units.group_size] if owner is None else owner
        return group, (2 * unit_id.stack + 1, number, parameter)
