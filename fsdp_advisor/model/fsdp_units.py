"""The units into which a wrap policy divides a model for FSDP, derived from the names and sizes of its parameters.

A unit is a layer, a module within a layer or outside all layers, a group of consecutive layers, or the root, which has all
parameters that no other unit has. Source: torch.distributed.fsdp.wrap (torch 2.13), `_recursive_wrap`,
`size_based_auto_wrap_policy`, `transformer_auto_wrap_policy`. The recorder compares the result with PyTorch's own policy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.wrap_policy import WrapPolicy, wrap_policy
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.tape import ROOT, MarkedUnit
from fsdp_advisor.model.tasks import MODULE_TASKS

FIRST_OF_ROOT = max(MarkedUnit) + 1
"""The number of the first module outside the layers that a policy makes a unit. Lower ones are those of `MarkedUnit`."""
WHOLE = -1
GROUP = -2
_WITHIN = 1000
"""The mark of the first module within a layer. Lower marks belong to units outside the layers."""


class UnitId(NamedTuple):
    """The name of a unit. Layers of one kind share it.

    - the root: `AT_ROOT`; another unit outside the layers: stack ROOT, and the number of its marks
    - a layer: its stack, and the number of the recorded layer
    - a module within a layer: as the layer, with the number of the module as `part`
    - a group of consecutive layers: its stack, its number, and GROUP as `part`
    """

    stack: int
    number: int
    part: int = WHOLE

    @property
    def is_outside_layers(self) -> bool:
        """Whether this is the root, or another unit outside the layers."""
        return self.stack == ROOT

    @property
    def is_layer(self) -> bool:
        """Whether this is a whole layer."""
        return self.stack != ROOT and self.part == WHOLE

    @property
    def layer(self) -> UnitId:
        """The layer of a module within it; itself for other units."""
        return self._replace(part=WHOLE)

    @property
    def mark(self) -> int:
        """The number that the unit's marks have on a tape. Groups have no marks.

        >>> UnitId(0, 3).mark, AT_ROOT.mark, UnitId(0, 3, 1).mark
        (0, 1, 1001)
        """
        if self.part != WHOLE:
            return _WITHIN + self.part
        return self.number if self.is_outside_layers else int(MarkedUnit.LAYER)


AT_ROOT = UnitId(ROOT, int(MarkedUnit.ROOT))


def module_mark(number: int, unit_id: UnitId) -> int:
    """The mark on the tape of a module that a wrap policy makes a unit: the `number`-th outside the layers, or within a layer.

    >>> module_mark(0, AT_ROOT), module_mark(0, UnitId(0, 3))
    (5, 1000)
    """
    return number + (FIRST_OF_ROOT if unit_id == AT_ROOT else _WITHIN)


def unit_at(mark: int, unit_id: UnitId) -> UnitId:
    """The unit of a mark in the code of a layer or of the root.

    >>> unit_at(1001, UnitId(0, 3)), unit_at(5, UnitId(0, 3))
    (UnitId(stack=0, number=3, part=1), UnitId(stack=-1, number=5, part=-1))
    """
    if mark >= _WITHIN:
        return unit_id._replace(part=mark - _WITHIN)
    return unit_id if mark == MarkedUnit.LAYER else UnitId(ROOT, mark)


def unit_of(profile: Profile, unit_id: UnitId) -> Unit:
    """The parameters of the root or of a recorded layer."""
    return profile.root if unit_id.is_outside_layers else profile.stacks[unit_id.stack].units[unit_id.number]


@dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """The units of a policy other than `layer`.

    `layers`: the recorded layers that are units. `of_root`: the names of the modules outside the layers that are units. `within`: by
    recorded layer, the names, relative to the layer, of the modules in it that are units. `groups`: by stack, the unit of each group
    of `group_size` consecutive layers. `members`: by unit, its parameters in the model's order; a unit without any is left out.
    `counts`: by unit, the number of real units that it stands for. `owner_in_root`: the unit of each of the root's parameters;
    `owner_in_layer`: by recorded layer, the unit of each of its parameters, None in a group.
    """

    layers: frozenset[UnitId]
    of_root: tuple[str, ...]
    within: Mapping[UnitId, tuple[str, ...]]
    groups: Mapping[int, tuple[UnitId, ...]]
    group_size: int
    members: Mapping[UnitId, tuple[Parameter, ...]]
    counts: Mapping[UnitId, int]
    owner_in_root: tuple[UnitId, ...]
    owner_in_layer: Mapping[UnitId, tuple[UnitId | None, ...]]

    @property
    def modules(self) -> bool:
        """Whether any unit is a single module, which is neither a layer, nor a group of layers, nor the root."""
        return bool(self.of_root or any(self.within.values()))


@lru_cache(maxsize=256)
def units_of(profile: Profile, wrap: str) -> Units:
    """The units of a model under a policy. Raises UsageError if the policy does not fit the model."""
    policy = wrap_policy(wrap)
    assert policy is not None
    by_id: dict[UnitId, Unit] = {
        UnitId(s, r): unit for s, stack in enumerate(profile.stacks) for r, unit in enumerate(stack.units)
    }
    layers, of_root, within = _chosen(profile, policy, by_id)
    owner_in_root = tuple(_owner_outside(p.name, of_root) for p in profile.root.parameters)
    _check_tied(profile, of_root)
    owner_in_layer: dict[UnitId, tuple[UnitId | None, ...]] = {
        unit_id: tuple(
            None
            if policy.kind == "every"
            else _owner_within(unit_id, p.name, within[unit_id])
            or (unit_id if unit_id in layers else _owner_outside(profile.stacks[unit_id.stack].path + ".", of_root))
            for p in unit.parameters
        )
        for unit_id, unit in by_id.items()
    }
    groups, grouped = _groups(profile, policy.number) if policy.kind == "every" else ({}, {})
    members, counts = _members(profile, owner_in_root, owner_in_layer)
    for unit_id, (unit_parameters, count) in grouped.items():
        members[unit_id], counts[unit_id] = unit_parameters, count
    return Units(
        layers=layers,
        of_root=of_root,
        within=within,
        groups=groups,
        group_size=policy.number if policy.kind == "every" else 1,
        members={unit: tuple(parameters) for unit, parameters in members.items() if parameters},
        counts=counts,
        owner_in_root=owner_in_root,
        owner_in_layer=owner_in_layer,
    )


_Chosen = tuple[frozenset[UnitId], tuple[str, ...], dict[UnitId, tuple[str, ...]]]


def _chosen(profile: Profile, policy: WrapPolicy, by_id: Mapping[UnitId, Unit]) -> _Chosen:
    """The layers, the modules outside them and the modules within them that the policy makes units."""
    nothing: dict[UnitId, tuple[str, ...]] = dict.fromkeys(by_id, ())
    match policy.kind:
        case "none" | "every":
            return frozenset(), (), nothing
        case "layer":
            return frozenset(by_id), (), nothing
        case "class":
            unknown = [name for name in policy.classes if name not in profile.layer_classes]
            if unknown:
                known = ", ".join(profile.layer_classes) or "none"
                raise UsageError(
                    f"{unknown[0]} is not a layer class of {profile.name}",
                    hint=f"its layer classes: {known}; or use --wrap size:N",
                )
            return frozenset(p for p, unit in by_id.items() if unit.kind in policy.classes), (), nothing
        case "size":
            return _chosen_by_size(profile, policy.number, by_id)
        case "peft":
            within = {unit_id: _trained_modules(unit.parameters) for unit_id, unit in by_id.items()}
            return frozenset(by_id), _trained_modules(profile.root.parameters), within
        case "lora":
            within = {unit_id: _lora_modules(unit.parameters) for unit_id, unit in by_id.items()}
            return frozenset(by_id), _lora_modules(profile.root.parameters), within


_LORA_MODULE = re.compile(r"(.+\.lora_(?:A|B|magnitude_vector)\.\w+)\.\w+|(.+)\.lora_embedding_[AB]\.\w+", re.ASCII)


def _lora_modules(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    """The modules of LoRA's matrices and magnitudes, and embeddings with LoRA, whose matrices have no module.

    Source: axolotl 0.19.0, monkeypatch/accelerate/fsdp2.py, `_process_lora_module_for_fsdp`.
    """
    found = (_LORA_MODULE.fullmatch(p.name) for p in parameters if p.role == "adapter" and p.module_runs)
    return tuple(dict.fromkeys(match[1] or match[2] for match in found if match))


def _trained_modules(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    """The modules with a trained weight and without modules below them that have parameters.

    Source: peft/utils/other.py (0.21), fsdp_auto_wrap_policy.
    """
    parents = {p.name.rpartition(".")[0] for p in parameters}
    trained = [p.name.removesuffix(".weight") for p in parameters if p.trainable and p.name.endswith(".weight")]
    return tuple(name for name in trained if not any(parent.startswith(name + ".") for parent in parents))


def _owner_outside(name: str, of_root: tuple[str, ...]) -> UnitId:
    """The innermost unit of the root whose module contains `name`, a parameter or stack outside the layers; AT_ROOT if there is none."""
    around = [module for module in of_root if name.startswith(module + ".")]
    return UnitId(ROOT, FIRST_OF_ROOT + of_root.index(max(around, key=len))) if around else AT_ROOT


def _owner_within(unit_id: UnitId, name: str, within: tuple[str, ...]) -> UnitId | None:
    around = [module for module in within if name.startswith(module + ".")]
    return unit_id._replace(part=within.index(max(around, key=len))) if around else None


def _check_tied(profile: Profile, of_root: tuple[str, ...]) -> None:
    for p in profile.root.parameters:
        owners = {_owner_outside(name, of_root) for name in (p.name, *p.tied)}
        if len(owners) > 1:
            raise UsageError(
                f"the policy puts the tied parameters {p.name} and {p.tied[0]} into different units, and PyTorch does not allow that",
                hint="use --wrap layer, or a larger size",
            )


def _members(
    profile: Profile, owner_in_root: tuple[UnitId, ...], owner_in_layer: Mapping[UnitId, tuple[UnitId | None, ...]]
) -> tuple[dict[UnitId, tuple[Parameter, ...]], dict[UnitId, int]]:
    """Two dictionaries by unit: its parameters in the model's order, and the number of real units that it stands for."""
    members: defaultdict[UnitId, list[Parameter]] = defaultdict(list)
    counts: dict[UnitId, int] = {}

    def add(owner: UnitId | None, parameter: Parameter, *, unit_id: UnitId) -> None:
        if owner is not None:
            members[owner].append(parameter)
            counts[owner] = 1 if owner.is_outside_layers else profile.stacks[unit_id.stack].counts[unit_id.number]

    for at, (begin, end) in enumerate(pairwise([0, *profile.order, len(profile.root.parameters)])):
        for of_root, parameter in zip(owner_in_root[begin:end], profile.root.parameters[begin:end], strict=True):
            add(of_root, parameter, unit_id=AT_ROOT)
        if at == len(profile.stacks):
            continue
        done: set[UnitId] = set()
        for recorded in profile.stacks[at].recorded_order:
            unit_id = UnitId(at, recorded)
            for owner, parameter in zip(
                owner_in_layer[unit_id], profile.stacks[at].units[recorded].parameters, strict=True
            ):
                if (owner is not None and owner.is_outside_layers) or unit_id not in done:
                    add(owner, parameter, unit_id=unit_id)
            done.add(unit_id)
    return {unit: tuple(parameters) for unit, parameters in members.items()}, counts


def _groups(
    profile: Profile, size: int
) -> tuple[dict[int, tuple[UnitId, ...]], dict[UnitId, tuple[tuple[Parameter, ...], int]]]:
    """By stack, the unit of each group of `size` layers; and by unit, its parameters and the number of groups that it stands for."""
    groups: dict[int, tuple[UnitId, ...]] = {}
    members: dict[UnitId, tuple[tuple[Parameter, ...], int]] = {}
    for s, stack in enumerate(profile.stacks):
        recorded = stack.recorded_order
        patterns = [recorded[i : i + size] for i in range(0, len(recorded), size)]
        numbers = {pattern: n for n, pattern in enumerate(dict.fromkeys(patterns))}
        groups[s] = tuple(UnitId(s, numbers[pattern], GROUP) for pattern in patterns)
        for pattern, n in numbers.items():
            parameters = tuple(p for layer in pattern for p in stack.units[layer].parameters)
            members[UnitId(s, n, GROUP)] = (parameters, patterns.count(pattern))
    return groups, members


# Wrapping by size


@dataclass(eq=False)
class _Module:
    """A module of the model. `own`: its direct parameters, by identity. `unit_id`: the recorded layer that it is, if it is one."""

    children: dict[str, _Module] = field(default_factory=dict)
    own: dict[object, int] = field(default_factory=dict)
    unit_id: UnitId | None = None

    def child(self, path: str) -> _Module:
        """The module at a path below this one, created if it does not exist."""
        module = self
        for name in path.split(".") if path else ():
            module = module.children.setdefault(name, _Module())
        return module

    def add(self, name: str, identity: object, elements: int) -> None:
        path, _, _ = name.rpartition(".")
        self.child(path).own[identity] = elements

    def parameters(self) -> dict[object, int]:
        found = dict(self.own)
        for child in self.children.values():
            found |= child.parameters()
        return found

    def paths(self, path: str = "") -> Iterator[str]:
        """The paths of this module and of all modules below it, parents first."""
        yield path
        for name, child in self.children.items():
            yield from child.paths(f"{path}.{name}" if path else name)

    @property
    def is_list(self) -> bool:
        """Whether it is a ModuleList: all its children have numbers for names."""
        return bool(self.children) and not self.own and all(name.isdecimal() for name in self.children)


def _chosen_by_size(profile: Profile, least: int, by_id: Mapping[UnitId, Unit]) -> _Chosen:
    """The modules that `size_based_auto_wrap_policy` wraps with `min_num_params=least`."""
    root = _Module()
    for index, p in enumerate(profile.root.parameters):
        for name in (p.name, *p.tied):
            root.add(name, index, p.elements)
    for s, stack in enumerate(profile.stacks):
        alone = profile.task in MODULE_TASKS and stack.depth == 1  # the stack's path is then the layer's own name
        for number, recorded in enumerate(stack.recorded_order):
            layer = root.child(stack.path if alone else f"{stack.path}.{number}")
            layer.unit_id = UnitId(s, recorded)
            for index, p in enumerate(stack.units[recorded].parameters):
                for name in (p.name, *p.tied):
                    layer.add(name, (s, number, index), p.elements)
    found: dict[str, None] = {}
    _wrap_children(root, "", least, found)
    layers = set()
    within: dict[UnitId, tuple[str, ...]] = {}
    layer_paths = list(_layer_paths(root, ""))
    for unit_id, path in dict(reversed(layer_paths)).items():  # the first real layer of each recorded one
        names = [name for name in root.child(path).paths(path) if name in found]
        within[unit_id] = tuple(name[len(path) + 1 :] for name in names if name != path)
        layers |= {unit_id} if path in names else set()
    of_root = [
        n
        for n in root.paths()
        if n in found and not any(n == path or n.startswith(path + ".") for _, path in layer_paths)
    ]
    return frozenset(layers), tuple(of_root), {unit_id: within.get(unit_id, ()) for unit_id in by_id}


def _wrap_children(module: _Module, path: str, least: int, found: dict[str, None]) -> int:
    """Add the descendants that size-based wrapping makes units to `found`, children first. Returns their number of elements."""
    total = 0
    for name, child in module.children.items():
        elements = sum(child.parameters().values())
        if elements < least:
            continue
        at = f"{path}.{name}" if path else name
        wrapped = _wrap_children(child, at, least, found)
        if elements - wrapped >= least and not child.is_list:
            found[at] = None
            wrapped = elements
        total += wrapped
    return total


def _layer_paths(module: _Module, path: str) -> Iterator[tuple[UnitId, str]]:
    """The recorded layer and the path of each real layer."""
    if module.unit_id is not None:
        yield module.unit_id, path
        return
    for name, child in module.children.items():
        yield from _layer_paths(child, f"{path}.{name}" if path else name)
