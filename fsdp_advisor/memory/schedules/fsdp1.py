"""PyTorch FSDP1 (`FullyShardedDataParallel`, `use_orig_params=True`, a unit per layer and the root).

Source: torch.distributed.fsdp._flat_param (`_init_flat_param_and_metadata`, `pre_unshard`, `unshard`, `post_unshard`) and
_runtime_utils (`_post_forward_reshard`, `_pre_backward_hook`, `_post_backward_hook`, `_reduce_grad`), torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.memory import optimizers
from fsdp_advisor.memory.held import NOTHING, Held, States, round_up
from fsdp_advisor.memory.ledger import (
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Ledger,
)
from fsdp_advisor.memory.replay import AT_ROOT, Place
from fsdp_advisor.memory.schedules.units import buffers, per_unit, places, summed
from fsdp_advisor.models.profile import Profile, Unit
from fsdp_advisor.plan import Plan

ALIGNMENT_BYTES = 16


def flat_elements(numels: list[int], compute_bytes: int, world_size: int) -> int:
    """Elements of a unit's flat parameter: parameters aligned to 16 bytes, the whole padded to a multiple of the ranks.

    >>> flat_elements([3, 8], 4, 5)
    15
    """
    aligned, total = ALIGNMENT_BYTES // compute_bytes, 0
    for numel in numels:
        total += -total % aligned + numel
    return total + -total % world_size


def first_shard(numels: list[int], compute_bytes: int, shard_elements: int) -> list[int]:
    """How many elements of each parameter lie in rank 0's shard.

    >>> first_shard([3, 8], 4, 6)
    [3, 2]
    """
    aligned, at, pieces = ALIGNMENT_BYTES // compute_bytes, 0, []
    for numel in numels:
        at += -at % aligned
        pieces.append(max(0, min(numel, shard_elements - at)))
        at += numel
    return pieces


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit's storages on rank 0, bytes rounded up to 512."""

    shard: Held
    optimizer: Held
    optimizer_temporaries: int
    low_precision_shard: int  # alive only while it is gathered
    unsharded: int
    reduce_input: int  # the gradient in the reduce dtype; 0 where it already is
    gradients: Held


class Fsdp1Schedule:
    distinct_micro_batches = 2
    grad_marks = False

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._plan = plan
        self._profile = profile
        self._offload = plan.offload == "parameters"
        self._reshard = plan.strategy in ("zero3", "hsdp")
        self._alone = plan.shard_degree == 1
        self._units = per_unit(profile, self._measure)
        self.states = self._states()
        self._prefetched = False

    def _measure(self, unit: Unit) -> UnitBytes:
        plan = self._plan
        numels = [p.elements for p in unit.parameters]
        elements = flat_elements(numels, plan.compute_bytes, plan.shard_degree)
        local = elements // plan.shard_degree
        pieces = first_shard(numels, plan.compute_bytes, local)
        optimizer, temporaries = NOTHING, 0
        for parameter, piece in zip(unit.parameters, pieces, strict=True):
            if parameter.trainable and piece:
                optimizer += optimizers.kept(plan.optim, (piece,), plan.param_bytes)
                if plan.optim != "adafactor":
                    temporaries += optimizers.step_temporaries(plan.optim, [(piece,)], plan.param_bytes)
        return UnitBytes(
            shard=Held.of(local * plan.param_bytes),
            optimizer=optimizer,
            optimizer_temporaries=temporaries,
            low_precision_shard=round_up(local * plan.compute_bytes) if plan.mixed and not self._alone else 0,
            unsharded=round_up(elements * plan.compute_bytes) if plan.mixed or not self._alone else 0,
            reduce_input=round_up(elements * plan.param_bytes) if plan.mixed and not self._alone else 0,
            gradients=Held.of(local * plan.param_bytes),
        )

    def _states(self) -> States:
        if self._offload:
            return States(buffers=buffers(self._profile))
        return States(
            parameters=summed(self._profile, self._units, "shard"),
            gradients=summed(self._profile, self._units, "gradients"),
            optimizer=summed(self._profile, self._units, "optimizer"),
            buffers=buffers(self._profile),
        )

    def begin_step(self, ledger: Ledger) -> None:
        ledger.add(PARAMETERS, self.states.parameters.rounded)
        ledger.add(OPTIMIZER, self.states.optimizer.rounded)
        ledger.add(OTHER, self.states.buffers.rounded)
        ledger.add(GRADIENTS, self.states.gradients.rounded)  # `zero_grad` does not reach the flat gradients ...
        self._stale = self.states.gradients.rounded
        self._prefetched = False

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._accumulating = index > 0

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        ledger.add(GRADIENTS, -self._stale)  # ... the next forward does (`_reset_flat_param_grad_info_if_needed`)
        self._stale = 0
        self._unshard(ledger, place)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        """The root keeps its parameters until backward needs them. (`_post_forward_reshard`)"""
        if self._reshard and place != AT_ROOT:
            ledger.add(UNSHARDED_PARAMETERS, -self._units[place].unsharded)

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if not self._reshard:
            return
        if place != AT_ROOT and not self._prefetched:
            self._unshard(ledger, place)
        self._following = following
        self._prefetched = following is not None and self._plan.backward_prefetch == "pre"
        if self._prefetched and following is not None:
            self._unshard(ledger, following)

    def post_backward(self, ledger: Ledger, place: Place, gradient_bytes: int) -> None:
        unit = self._units[place]
        ledger.add(UNSHARDED_PARAMETERS, -unit.unsharded)
        if (
            self._reshard
            and self._plan.backward_prefetch == "post"
            and place != AT_ROOT
            and self._following is not None
        ):
            self._prefetched = True
            self._unshard(ledger, self._following)
        if self._alone and not self._plan.mixed:  # NO_SHARD: the flat gradient itself is kept
            ledger.add(UNSHARDED_GRADIENTS, -gradient_bytes)
            ledger.add(GRADIENTS, 0 if self._accumulating else gradient_bytes)
            return
        ledger.add(COMMUNICATION, unit.reduce_input)
        ledger.add(GRADIENTS, unit.gradients.rounded)
        if self._accumulating or self._offload:
            ledger.add(GRADIENTS, -unit.gradients.rounded)
        ledger.add(COMMUNICATION, -unit.reduce_input)
        ledger.add(UNSHARDED_GRADIENTS, -gradient_bytes)

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int, gradient_bytes: int) -> None:
        pass

    def end_backward(self, ledger: Ledger, root_gradient_bytes: int) -> None:
        pass

    def optimizer_step(self, ledger: Ledger) -> None:
        if self._offload:
            return
        high = sum(self._units[place].optimizer_temporaries * count for place, _, count in places(self._profile))
        ledger.add(TEMPORARIES, high)
        ledger.add(TEMPORARIES, -high)

    def _unshard(self, ledger: Ledger, place: Place) -> None:
        unit = self._units[place]
        ledger.add(COMMUNICATION, unit.low_precision_shard)
        ledger.add(UNSHARDED_PARAMETERS, unit.unsharded)
        ledger.add(COMMUNICATION, -unit.low_precision_shard)
