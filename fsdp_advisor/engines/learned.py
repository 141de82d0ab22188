"""Trainable parameters that get no gradient in a step, such as a vision tower in a step on text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.engines.model_outputs import searches_by_default
from fsdp_advisor.engines.wrapping import wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.model.tape import Op, Tape


def learned(profile: Profile, tape: Tape, plan: Plan) -> Profile:
    """The profile without gradients and optimizer state of the parameters that get no gradient in the tape's step; they are `idle`.

    DDP and FSDP2 set only gradients that exist, and an optimizer makes state only for these. (Without find_unused_parameters DDP fails in
    its second step, so the estimate and exported files have it.)
    FSDP1 sets the flat gradient of a unit if any of its parameters gets one. The flat tensors of DeepSpeed contain all parameters.
    Source: torch 2.13, csrc/distributed/c10d/reducer.cpp, `finalize_bucket_dense`; distributed/fsdp/_fully_shard/_fsdp_param_group.py,
    `post_backward`; distributed/fsdp/_runtime_utils.py, `_post_backward_hook`; optim/adamw.py, `_init_group`.
    """
    if plan.backend == "deepspeed":
        return profile
    if plan.backend == "fsdp1":
        return profile if wrapping_for(profile, plan).units is not None else _learned(profile, tape, by_unit=True)
    return _learned(profile, tape)


def gradient_warnings(profile: Profile, tape: Tape, plan: Plan) -> tuple[str, ...]:
    """A warning about parameters that get no gradient, if there are any."""
    if not (names := without_gradient(profile, tape, by_unit=plan.backend == "fsdp1")):
        return ()
    tensors = sum(names.values())
    count = "1 parameter gets" if tensors == 1 else f"{tensors} parameters get"
    what = f"{count} no gradient in this step, such as {next(iter(names))}"
    none = "the estimate has no gradients and no optimizer state for them"
    if plan.backend == "deepspeed":
        return (
            f"{what}: DeepSpeed keeps gradients and optimizer state for them nevertheless, and the estimate contains these",
        )
    if plan.backend == "fsdp1":
        return (f"{what}: {none}, unless FSDP1 flattens them together with parameters that get one",)
    if plan.backend == "fsdp2" or plan.world_size == 1:
        return (f"{what}: {none}",)
    buckets = f"{none}, but DDP's buckets contain them"
    if plan.checkpointing == "reentrant":
        return (
            f"{what}: DDP fails in the second step unless they are frozen (--freeze); it cannot search for them with reentrant"
            f" checkpoints; {buckets}",
        )
    if searches_by_default(plan, adapted=bool(profile.adapter_parameters)):
        return (f"{what}: {buckets}",)
    return (
        f"{what}: DDP fails in the second step unless it searches for them (find_unused_parameters, as exported files set it) or they are"
        f" frozen (--freeze); {buckets}",
    )


def without_gradient(profile: Profile, tape: Tape, *, by_unit: bool = False) -> Counter[str]:
    """The trainable parameters that get no gradient in the tape's step: the number of tensors by name within the unit.

    `by_unit`: only those of units that get none at all. FSDP1's tapes say no more than that a unit's flat gradient is ready.
    """
    found: Counter[str] = Counter()
    learned_units = _learned(profile, tape, by_unit=by_unit).counted_units()
    for (before, count), (after, _) in zip(profile.counted_units(), learned_units, strict=True):
        for own, other in zip(before.parameters, after.parameters, strict=True):
            if own.trainable and not other.trainable:
                found[own.name] += count
    return found


@lru_cache(maxsize=256)
def _learned(profile: Profile, tape: Tape, *, by_unit: bool = False) -> Profile:
    """The profile in which parameters without a gradient are idle. `by_unit`: they are idle only if no parameter of their layer, or of the
    root, gets a gradient.

    The gradient of a parameter that layers share may become ready in another layer than its own, so it is never idle.
    """
    marks = Counter(
        (AT_ROOT if at_root else UnitId(segment.stack, segment.layer), number)
        for segment in tape.segments
        for op, number, at_root in segment.events
        if op == Op.GRAD_READY
    )
    ready: defaultdict[UnitId, set[int]] = defaultdict(set)
    for (unit_id, number), count in marks.items():
        if count > 1 and not unit_id.is_outside_layers:
            return profile  # the layers of several stacks alternate, so a segment has marks of other layers
        ready[unit_id].add(number)

    def of(unit: Unit, unit_id: UnitId) -> Unit:
        idle = {n for n, p in enumerate(unit.parameters) if p.trainable and not p.in_other_layers} - ready[unit_id]
        if not idle or (by_unit and ready[unit_id]):
            return unit
        parameters = (replace(p, trainable=False, idle=True) if n in idle else p for n, p in enumerate(unit.parameters))
        return replace(unit, parameters=tuple(parameters))

    root = of(profile.root, AT_ROOT)
    stacks = tuple(
        replace(stack, units=tuple(of(unit, UnitId(number, layer)) for layer, unit in enumerate(stack.units)))
        for number, stack in enumerate(profile.stacks)
    )
    return profile if (root, stacks) == (profile.root, profile.stacks) else replace(profile, root=root, stacks=stacks)
