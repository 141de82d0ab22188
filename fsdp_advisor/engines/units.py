"""Sums over a profile's units. Engines compute a unit's bytes once per recorded layer, not once per real layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, Units
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.program.storages import NO_STORAGES, Storages

T = TypeVar("T")


def per_unit(profile: Profile, compute: Callable[[Unit], T]) -> dict[UnitId, T]:
    """The result of `compute` for the root and for each recorded layer. Equal units are computed once."""
    known: dict[int, T] = {}
    result = {}
    for unit_id, unit, _ in recorded_units(profile):
        if id(unit) not in known:
            known[id(unit)] = compute(unit)
        result[unit_id] = known[id(unit)]
    return result


def recorded_units(profile: Profile) -> Iterator[tuple[UnitId, Unit, int]]:
    """(id, unit, number of real units it stands for) of the root and of each recorded layer, the root first."""
    yield AT_ROOT, profile.root, 1
    for s, stack in enumerate(profile.stacks):
        for layer, (unit, count) in enumerate(zip(stack.units, stack.counts, strict=True)):
            yield UnitId(s, layer), unit, count


def parameters_in_order(profile: Profile) -> Iterator[tuple[UnitId, int, Parameter]]:
    """Every real parameter in the order of `model.parameters()`, with the id of its unit and its index there."""
    done = 0
    root = list(enumerate(profile.root.parameters))
    for s, (before, stack) in enumerate(zip(profile.order, profile.stacks, strict=True)):
        yield from ((AT_ROOT, index, p) for index, p in root[done:before])
        done = before
        for layer in stack.recorded_order:
            yield from ((UnitId(s, layer), index, p) for index, p in enumerate(stack.units[layer].parameters))
    yield from ((AT_ROOT, index, p) for index, p in root[done:])


def total(profile: Profile, of: Callable[[Unit], Storages]) -> Storages:
    """The sum of `of(unit)` over all real units."""
    by_unit = per_unit(profile, of)
    return summed(profile, by_unit, lambda storages: storages, [of(part) for part in root_parts(profile)])


def summed(
    profile: Profile, by_unit: Mapping[UnitId, T], of: Callable[[T], Storages], root: Sequence[Storages] | None = None
) -> Storages:
    """The sum of `of` over all units of the model, in the order of `model.parameters()`.

    `by_unit` has the root and each recorded layer, which counts once for each layer that it stands for. `root`: what to add for each of
    the root's parts (`root_parts`) instead of `of(by_unit[AT_ROOT])`, which comes first.
    """
    parts = root or [of(by_unit[AT_ROOT]), *[NO_STORAGES] * len(profile.stacks)]
    result = NO_STORAGES
    for s, stack in enumerate(profile.stacks):
        result += parts[s]
        for run in stack.runs:
            pattern = NO_STORAGES
            for layer in run.pattern:
                pattern += of(by_unit[UnitId(s, layer)])
            result += pattern * run.repeats
    return result + parts[-1]


def total_of_policy(units: Units, by_unit: Mapping[UnitId, T], of: Callable[[T], Storages]) -> Storages:
    """The sum of `of` over all real units of a wrap policy, the root last."""
    result = NO_STORAGES
    for unit_id in sorted(by_unit, key=lambda unit_id: unit_id == AT_ROOT):
        result += of(by_unit[unit_id]) * units.counts[unit_id]
    return result


def root_parts(profile: Profile) -> list[Unit]:
    """The root divided at the stacks: its parameters before the first stack, before the second ..., and after the last. The last
    part has all buffers.
    """
    bounds = [0, *profile.order, len(profile.root.parameters)]
    parts = [replace(profile.root, parameters=profile.root.parameters[a:b], buffers=()) for a, b in pairwise(bounds)]
    return [*parts[:-1], replace(parts[-1], buffers=profile.root.buffers)]


def buffers(profile: Profile, loaded_bytes: int, floating_bytes: int | None = None) -> Storages:
    """The model's buffers, which every rank keeps whole. `loaded_bytes`: bytes per element of buffers in the dtype in which the model is
    loaded. `floating_bytes`: bytes per element to which an engine casts registered floating-point buffers.
    """

    def of(unit: Unit) -> Storages:
        result = NO_STORAGES
        for buffer in unit.buffers:
            element = loaded_bytes if buffer.is_usual else buffer.bytes_per_element
            if floating_bytes and buffer.is_cast:
                element = floating_bytes
            result += Storages.of(buffer.bytes_at(element))
        return result

    return total(profile, of)
