"""LOMO and AdaLomo, which update each parameter in backward, as soon as the gradient of the next parameter is complete.

So at most two gradients live at a time. A parameter in 16 bits and its gradient are converted to fp32 for the update.

Source: lomo-optim 0.1.1, lomo.py and adalomo.py (`fuse_update`, `fused_backward`); accelerate 1.15, accelerator.py, `backward`;
transformers 5.23, trainer_optimizer.py, `_get_lomo_optimizer`.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.policies.optimizers.interface import (
    NamedOptimizer,
    NotForDeepSpeed,
    Refusal,
    Shape,
    Shards,
    without_deepspeed,
)
from fsdp_advisor.program.storages import NO_STORAGES, Storages

_ACCUMULATION = "updates the weights after each micro-batch, and does not clip gradients"


class Lomo(NotForDeepSpeed):
    """LOMO, which has no state. The update of a 16-bit parameter needs fp32 copies of the parameter and of its gradient."""

    steps_one_by_one: ClassVar[bool] = True

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return NO_STORAGES

    def textbook_bytes(self, element_bytes: int) -> int:
        return 0

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The fp32 copy of a 16-bit parameter. The engine counts the fp32 copy of the gradient."""
        return Storages.of(FP32_BYTES * prod(shape)) if element_bytes != FP32_BYTES else NO_STORAGES

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of the sum (3 tensors in fp32) and, for a 16-bit parameter, of two casts to fp32 and one back."""
        casts = 3 * (element_bytes + FP32_BYTES) if element_bytes != FP32_BYTES else 0
        return (3 * FP32_BYTES + casts) * parameter.elements


class AdaLomo(Lomo):
    """AdaLomo, which has a second moment in fp32, factored into rows and columns; whole for a tensor of one dimension."""

    def shard_failure(self, parameter: Parameter, shards: Shards) -> str | None:
        if len(parameter.shape) <= 2:
            return None
        return f"AdaLomo fails: {parameter.name} has {len(parameter.shape)} dimensions, and it factors two"

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        if not prod(shape):
            return NO_STORAGES
        return sum((Storages.of(FP32_BYTES * size) for size in shape), NO_STORAGES)

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """Two fp32 tensors in addition to the fp32 gradient: its square, and the square plus epsilon, which the update later replaces."""
        return Storages.of(FP32_BYTES * prod(shape), 2)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """LOMO's bytes and 16 more fp32 tensors: the square, epsilon, two means, the update, its norm and division, the parameter's
        norm.
        """
        return super().step_bytes(parameter, element_bytes) + 16 * FP32_BYTES * parameter.elements


def _lomo(cls: type[Lomo], name: OptimizerName, label: str, *notes: str, made_with_state: bool = False) -> Lomo:
    script = Refusal(f"{label} needs its own backward, which exported scripts do not have")
    return cls(
        name=name,
        transformers=NamedOptimizer(name=name),
        **without_deepspeed(name),
        script=script,
        notes=(f"{label} {_ACCUMULATION}", *notes),
        backward_update="next gradient",
        made_with_state=made_with_state,
    )


LOMO = _lomo(Lomo, "lomo", "LOMO")
ADALOMO = _lomo(
    AdaLomo,
    "adalomo",
    "AdaLomo",
    "the GPU's workspace for averaging columns (138 MB on an H100): it matters only in models without larger matrices",
    made_with_state=True,
)
