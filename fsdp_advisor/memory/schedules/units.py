"""Sums over a profile's units: every schedule computes a unit's bytes once per recorded layer, never per real layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from fsdp_advisor.memory.held import NOTHING, Held
from fsdp_advisor.memory.replay import AT_ROOT, Place
from fsdp_advisor.models.profile import Profile, Unit

T = TypeVar("T")


def per_unit(profile: Profile, compute: Callable[[Unit], T]) -> dict[Place, T]:
    """`compute` of the root and of each recorded layer; units that are equal are computed once."""
    known: dict[int, T] = {}
    result = {}
    for place, unit, _ in places(profile):
        if id(unit) not in known:
            known[id(unit)] = compute(unit)
        result[place] = known[id(unit)]
    return result


def places(profile: Profile) -> Iterator[tuple[Place, Unit, int]]:
    """(place, unit, number of real layers it stands for), the root first."""
    yield AT_ROOT, profile.root, 1
    for s, stack in enumerate(profile.stacks):
        for layer, (unit, count) in enumerate(zip(stack.units, stack.counts, strict=True)):
            yield (s, layer), unit, count


def total(profile: Profile, held: Callable[[Unit], Held]) -> Held:
    """The sum over all real units."""
    result = NOTHING
    by_place = per_unit(profile, held)
    for place, _, count in places(profile):
        result += by_place[place] * count
    return result


def summed(profile: Profile, by_place: Mapping[Place, object], what: str) -> Held:
    """One `Held` attribute of what was computed per unit, over all real units."""
    result = NOTHING
    for place, _, count in places(profile):
        result += getattr(by_place[place], what) * count
    return result


def buffers(profile: Profile) -> Held:
    """Registered buffers: every rank holds all of them."""

    def of(unit: Unit) -> Held:
        result = NOTHING
        for buffer in unit.buffers:
            result += Held.of(buffer.n_bytes)
        return result

    return total(profile, of)
