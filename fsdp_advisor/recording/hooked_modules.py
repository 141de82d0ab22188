"""The modules of a model that a recorded step hooks, and which of them a parameter belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, Units, module_mark
from fsdp_advisor.model.tape import ROOT, MarkedUnit
from fsdp_advisor.recording.source import LayerStack


@dataclass(frozen=True, eq=False)
class HookedModule:
    """A module with hooks: the root, a layer, or a module that a wrap policy makes a unit.

    `number`: the position of a policy's module among those of its layer, or among those outside the layers; None for the root and for
    layers. `mark`: the number of its marks. `is_unit`: False for a layer whose parameters belong to other units.
    """

    module: nn.Module
    stack: int
    layer: int
    mark: int
    number: int | None = None
    is_unit: bool = True

    @property
    def is_root(self) -> bool:
        return self.number is None and self.stack == ROOT

    @property
    def is_layer(self) -> bool:
        return self.number is None and self.stack != ROOT

    @property
    def is_within_layer(self) -> bool:
        return self.number is not None and self.stack != ROOT


class Leaf(NamedTuple):
    """The module that a leaf parameter belongs to, and the parameter's index in that module. A flat parameter belongs to its unit's
    module.
    """

    hooked: HookedModule
    number: int


def hooked_modules(model: nn.Module, stacks: list[LayerStack], units: Units | None) -> list[HookedModule]:
    """The root, every layer and every other unit."""
    found = [HookedModule(model, ROOT, 0, MarkedUnit.ROOT)]
    for n, name in enumerate(units.of_root if units else ()):
        found.append(HookedModule(model.get_submodule(name), ROOT, 0, module_mark(n, AT_ROOT), n))
    for s, stack in enumerate(stacks):
        for i, layer in enumerate(stack.layers):
            unit_id = UnitId(s, i)
            is_unit = units is None or unit_id in units.layers
            found.append(HookedModule(layer, s, i, MarkedUnit.LAYER, is_unit=is_unit))
            for n, name in enumerate(units.within[unit_id] if units else ()):
                found.append(HookedModule(layer.get_submodule(name), s, i, module_mark(n, unit_id), n))
    return found
