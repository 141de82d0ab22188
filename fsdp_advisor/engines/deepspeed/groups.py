"""The parameter groups of DeepSpeed's optimizer, and the positions of parameters in the flat buffers of stages 1 and 2.

Stages 1 and 2 flatten each group into one buffer, and each rank owns 1/N of each buffer. Stage 3 divides each group into sub-groups. An
optimizer has one group, Muon two.
Read in DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.settings import stage
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.optimizers import optimizer_of

ROOT = -1
"""Takes the place of a stack's number in `Placed` for the root's parameters."""


class Placed(NamedTuple):
    """A trained parameter of the real model: its stack (or ROOT), its layer there, and its number among the layer's parameters."""

    parameter: Parameter
    stack: int
    layer: int
    number: int


class Group(NamedTuple):
    """The trained parameters of one group, in the order of the flat buffer. `by_muon`: whether Muon steps them."""

    placed: tuple[Placed, ...]
    by_muon: bool = False

    @property
    def parameters(self) -> Iterator[Parameter]:
        return (each.parameter for each in self.placed)

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)


def groups(profile: Profile, plan: Plan) -> tuple[Group, ...]:
    """The groups of the plan's optimizer, without empty ones. Muon's is first, sorted by shape, the largest first.

    Under stage 3 `deepspeed.zero.Init` has sharded the parameters before, which leaves no shapes to sort by.
    Source: runtime/engine.py, _muon_param_groups; runtime/zero/muon/original_muon.py, MuonWithAuxAdam.__init__.
    """
    trained = _trained(profile)
    if not optimizer_of(plan).is_deepspeeds:
        return (Group(trained),)
    matrices = [each for each in trained if is_of_muon(profile, each)]
    others = tuple(each for each in trained if not is_of_muon(profile, each))
    if stage(plan) < 3:
        matrices.sort(key=lambda each: each.parameter.shape, reverse=True)
    both = Group(tuple(matrices), by_muon=True), Group(others)
    return tuple(group for group in both if group.placed)


def is_of_muon(profile: Profile, placed: Placed) -> bool:
    """Whether DeepSpeed's Muon steps the parameter: any but vectors, and those with `embed` or `lm_head` in their name.

    Source: deepspeed/__init__.py, set_optimizer_flags.
    """
    path = "" if placed.stack == ROOT else profile.stacks[placed.stack].path
    name = f"{path}.{placed.parameter.name}".lower()
    return len(placed.parameter.shape) >= 2 and "embed" not in name and "lm_head" not in name


@lru_cache(maxsize=16)
def _trained(profile: Profile) -> tuple[Placed, ...]:
    """Every trained parameter, in the order of `model.parameters()`."""
    return tuple(_placed(profile))


def _placed(profile: Profile) -> Iterator[Placed]:
    root = enumerate(profile.root.parameters)
    done = 0
    for s, (stack, before) in enumerate(zip(profile.stacks, profile.order, strict=True)):
        yield from (Placed(p, ROOT, 0, n) for n, p in _next(root, before - done) if p.trainable)
        done = before
        for layer, unit in enumerate(stack.layers()):
            yield from (Placed(p, s, layer, n) for n, p in enumerate(unit.parameters) if p.trainable)
    yield from (Placed(p, ROOT, 0, n) for n, p in root if p.trainable)


def _next(numbered: Iterator[tuple[int, Parameter]], count: int) -> list[tuple[int, Parameter]]:
    return [next(numbered) for _ in range(count)]
