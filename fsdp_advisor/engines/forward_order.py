"""The order in which units end their forwards, from which FSDP1 and FSDP2 choose the unit to prefetch in backward."""

from __future__ import annotations

from collections import defaultdict

from fsdp_advisor.model.fsdp_units import UnitId


class ForwardOrder:
    """The units of one micro-batch in the order in which their forwards ended. A unit that runs several times is in it as often."""

    def __init__(self) -> None:
        self._units: list[UnitId] = []
        self._indices: defaultdict[UnitId, list[int]] = defaultdict(list)  # those whose backward has not begun

    def clear(self) -> None:
        self._units.clear()
        self._indices.clear()

    def record(self, unit: UnitId, *, has_backward: bool = True) -> None:
        """The unit's forward has ended. `has_backward`: its backward chooses a unit."""
        if has_backward:
            self._indices[unit].append(len(self._units))
        self._units.append(unit)

    def pop_target(self, unit: UnitId) -> UnitId | None:
        """The unit whose forward ended just before the last forward of `unit`, whose backward begins. None if `unit` ran first or if that
        earlier unit's backward has begun.
        """
        if not self._indices[unit]:
            return None
        before = self._indices[unit].pop() - 1
        target = self._units[before] if before >= 0 else None
        return target if target is not None and before in self._indices[target] else None
