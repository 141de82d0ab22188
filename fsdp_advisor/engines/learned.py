"""Trainable parameters that get no gradient in a step, such as a vision tower in a step on text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.model.tape import Op, Tape

KEEP_ALL_TRAINABLE = ("fsdp1", "deepspeed")
"""Backends whose flat tensors contain gradients and optimizer state of every trainable parameter, with or without a gradient."""


def learned(profile: Profile, tape: Tape, plan: Plan) -> Profile:
    """The profile without gradients and optimizer state of the parameters that get no gradient in the tape's step.

    FSDP2 reduces only gradients that exist, and an optimizer makes state only for these. Source: torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`; optim/adamw.py, `_init_group`. The buckets of DDP, and the flat
    tensors of FSDP1 and DeepSpeed, contain parameters without gradient nevertheless.
    """
    if plan.backend in KEEP_ALL_TRAINABLE or (plan.backend == "ddp" and plan.world_size > 1):
        return profile
    return _learned(profile, tape)


def gradient_warnings(profile: Profile, tape: Tape, plan: Plan) -> tuple[str, ...]:
    """A warning about parameters that get no gradient, if there are any."""
    if plan.backend == "fsdp1" or not (names := without_gradient(profile, tape)):
        return ()
    tensors = sum(names.values())
    count = "1 parameter gets" if tensors == 1 else f"{tensors} parameters get"
    what = f"{count} no gradient in this step, such as {next(iter(names))}"
    if plan.backend == "ddp" and plan.world_size > 1:
        return (
            f"{what}: DDP fails in the second step unless find_unused_parameters is True or they are frozen (--freeze); the"
            " estimate contains them",
        )
    if plan.backend == "deepspeed":
        return (
            f"{what}: DeepSpeed keeps gradients and optimizer state for them nevertheless, and the estimate contains these",
        )
    return (f"{what}: the estimate has no gradients and no optimizer state for them",)


def without_gradient(profile: Profile, tape: Tape) -> Counter[str]:
    """The trainable parameters that get no gradient in the tape's step: the number of tensors by name within the unit."""
    found: Counter[str] = Counter()
    for (before, count), (after, _) in zip(
        profile.counted_units(), _learned(profile, tape).counted_units(), strict=True
    ):
        for own, other in zip(before.parameters, after.parameters, strict=True):
            if own.trainable and not other.trainable:
                found[own.name] += count
    return found


@lru_cache(maxsize=256)
def _learned(profile: Profile, tape: Tape) -> Profile:
    marks = Counter(
        (AT_ROOT if at_root else UnitId(segment.stack, segment.layer), number)
        for segment in tape.segments
        for op, number, at_root in segment.events
        if op == Op.GRAD_READY
    )
    ready: defaultdict[UnitId, set[int]] = defaultdict(set)
    for (place, number), count in marks.items():
        if count > 1 and not place.is_outside_layers:
            return profile  # the layers of several stacks alternate, so a segment has marks of other layers
        ready[place].add(number)

    def of(unit: Unit, place: UnitId) -> Unit:
        idle = {number for number, p in enumerate(unit.parameters) if p.trainable} - ready[place]
        if not idle:
            return unit
        parameters = (replace(p, trainable=p.trainable and n not in idle) for n, p in enumerate(unit.parameters))
        return replace(unit, parameters=tuple(parameters))

    root = of(profile.root, AT_ROOT)
    stacks = tuple(
        replace(stack, units=tuple(of(unit, UnitId(number, layer)) for layer, unit in enumerate(stack.units)))
        for number, stack in enumerate(profile.stacks)
    )
    return profile if (root, stacks) == (profile.root, profile.stacks) else replace(profile, root=root, stacks=stacks)
