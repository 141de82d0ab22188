"""What the optimizer's step allocates, reads and writes, for engines that step each parameter's local tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fsdp_advisor.engines.units import places, total
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory import optimizers
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.program.storages import NO_STORAGES, Storages

_STEP_BYTES: dict[str, tuple[float, float]] = {  # in elements of the parameters' dtype, and in bytes
    "adamw_torch_fused": (7, 0),  # reads p, g, m, v; writes p, m, v
    "adamw_torch": (19, 0),  # foreach: eight passes over lists of tensors
    "sgd": (3, 0),
    "sgd_momentum": (5, 0),
    "adafactor": (9, 0),  # p, g, and the update several times over
    "adamw_bnb_8bit": (3, 4),  # p, g, p; two moments of a byte read and written
}


def optimizer_bytes(plan: Plan, elements: float, *, masters: bool = False) -> float:
    """Bytes of GPU memory that a step over `elements` parameters reads and writes. `masters`: norm, cast in and cast out too."""
    per_element, rest = _STEP_BYTES[plan.optim]
    return elements * (per_element * plan.param_bytes + rest + (16 if masters else 0))


def optimizer_temporaries(profile: Profile, plan: Plan, shape_of: Callable[[Parameter], tuple[int, ...]]) -> Storages:
    """What the optimizer's step allocates over all trainable parameters; `shape_of` gives each one's local shape."""
    if optimizers.one_by_one(plan):
        largest = max(
            (shape_of(p) for _, u, _ in places(profile) for p in u.parameters if p.trainable), key=prod, default=(0,)
        )
        return optimizers.one_update(largest)

    def of(unit: Unit) -> Storages:
        shapes = [shape_of(p) for p in unit.parameters if p.trainable]
        return optimizers.step_temporaries(plan.optim, shapes, plan.param_bytes)

    return total(profile, of)


def gradient_norms(profile: Profile, plan: Plan) -> Storages:
    """What clipping allocates: a scalar for each trainable parameter; nothing if the job does not clip."""
    if not plan.clips:
        return NO_STORAGES
    return total(profile, lambda unit: Storages.of(optimizers.NORM_BYTES, sum(p.trainable for p in unit.parameters)))
