"""PyTorch FSDP2: `fully_shard` on each layer and on the root, `reshard_after_forward` the same for all of them.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParam._init_sharded_param` (dim-0 chunks, padded),
`foreach_all_gather`, `FSDPParamGroup.wait_for_unshard`, `post_backward`, `foreach_reduce`, `FSDPState._post_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fsdp_advisor.memory import optimizers
from fsdp_advisor.memory.held import ALIGNMENT, NOTHING, Held, States, round_up
from fsdp_advisor.memory.ledger import (
    COMMUNICATION,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Ledger,
)
from fsdp_advisor.memory.replay import AT_ROOT, Place
from fsdp_advisor.memory.schedules.units import buffers, per_unit, places, summed, total
from fsdp_advisor.memory.wrapping import EMBEDDING, HEAD, wrapping_of, wraps_root_apart
from fsdp_advisor.models.profile import ROOT, Parameter, Profile, Unit
from fsdp_advisor.plan import Plan


def shard_shape(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """The chunk of a parameter that rank 0 keeps: ceil(dim 0 / shards) rows.

    Source: torch.distributed.tensor._dtensor_spec / `_chunk_with_empty`; rank 0 holds the first, largest chunk.
    >>> shard_shape((10, 3), 4)
    (3, 3)
    """
    return (-(-shape[0] // shards), *shape[1:]) if shape else (1,)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit's storages on rank 0, bytes each rounded up to 512."""

    parameters: Held
    optimizer: Held
    gradients: Held  # one storage: the reduce-scatter's output, of which the sharded gradients are views
    gather_input: int  # flat copy of the shards in the compute dtype; 0 where the shards are gathered as they are
    gather_output: int
    unsharded: int  # the gathered parameters, one storage each, padded
    reduce_input: int
    reduce_output: Held  # in the reduce dtype, where that is not the gradients'
    whole_gradients: int  # one storage per parameter, as autograd makes them
    shards: tuple[int, ...]  # elements of each parameter's local shard, for world size 1 and offload


class Fsdp2Schedule:
    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self._offload = plan.offload == "parameters"
        self._reshard = plan.strategy in ("zero3", "hsdp")
        self._alone = plan.shard_degree == 1
        self._casts = plan.mixed
        self._wrapping = wrapping_of(profile, wraps_root_apart(plan))
        self._units = per_unit(profile, self._measure)
        self._units |= {place: self._measure(part.unit) for place, part in self._wrapping.parts.items()}
        self.grad_marks = plan.defers_reduction
        self.distinct_micro_batches = 3 if plan.defers_reduction else 2
        self.states = self._states()
        self._reduce_outputs = self._summed("reduce_output").rounded
        self._prefetched = False
        self._held_output = 0  # forward keeps the last all-gather's output until the next copy-out
        self._reducing = 0  # the last reduce-scatter's input lives until the next one's

    def _measure(self, unit: Unit) -> UnitBytes:
        plan, n = self._plan, self._plan.shard_degree
        shapes = [shard_shape(p.shape, n) for p in unit.parameters]
        locals_ = [prod(s) for s in shapes]
        elements = sum(locals_)
        trainable = [(p, e) for p, e in zip(unit.parameters, locals_, strict=True) if p.trainable]
        parameters = optimizer = NOTHING
        for parameter, shape, e in zip(unit.parameters, shapes, locals_, strict=True):
            parameters += Held.of(e * plan.param_bytes)
            if parameter.trainable:
                optimizer += optimizers.kept(plan.optim, shape, plan.param_bytes)
        reduced = sum(e for _, e in trainable)
        return UnitBytes(
            parameters=parameters,
            optimizer=optimizer,
            gradients=Held.of(reduced * plan.param_bytes),
            gather_input=round_up(elements * plan.compute_bytes) if self._casts and not self._offload else 0,
            gather_output=round_up(elements * n * plan.compute_bytes),
            unsharded=sum(round_up(e * n * plan.compute_bytes) for e in locals_),
            reduce_input=round_up(reduced * n * plan.reduce_bytes),
            reduce_output=Held.of(reduced * plan.reduce_bytes) if plan.reduce_bytes != plan.param_bytes else NOTHING,
            whole_gradients=sum(round_up(p.elements * plan.compute_bytes) for p, _ in trainable),
            shards=tuple(locals_),
        )

    def _states(self) -> States:
        if self._offload:
            return States(buffers=buffers(self._profile))
        return States(
            parameters=self._summed("parameters"),
            gradients=self._summed("gradients"),
            optimizer=self._summed("optimizer"),
            buffers=buffers(self._profile),
        )

    def _summed(self, what: str) -> Held:
        beside = (getattr(self._units[place], what) for place in self._wrapping.parts if place != AT_ROOT)
        return sum(beside, summed(self._profile, self._units, what))

    # The step

    def begin_step(self, ledger: Ledger) -> None:
        ledger.add(PARAMETERS, self.states.parameters.rounded)
        ledger.add(OPTIMIZER, self.states.optimizer.rounded)
        ledger.add(OTHER, self.states.buffers.rounded)
        self._prefetched = False
        self._held_output = self._reducing = self._all_reduced = 0

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._accumulating = index > 0
        last = index == min(self._plan.gradient_accumulation_steps, self.distinct_micro_batches) - 1
        self._reduces = last or not self._plan.defers_reduction

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        if not self._units[place].shards:
            return
        self._gather(ledger, place)
        self._copy_out(ledger, place, forward=True)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        if self._reshards(place):
            self._free(ledger, place)
        if place == AT_ROOT:
            ledger.add(COMMUNICATION, -self._held_output)
            self._held_output = 0

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if self._reshards(place):
            if not self._prefetched:
                self._gather(ledger, place)
            self._copy_out(ledger, place, forward=False)
        target = self._before(place, following)
        self._prefetched = target is not None and self._reshards(target)
        if target is not None and self._prefetched:
            self._gather(ledger, target)

    def _before(self, place: Place, following: Place | None) -> Place | None:
        """The unit that ran before this one in forward, which its backward prefetches. `following` is the next layer."""
        if place == AT_ROOT and HEAD in self._wrapping.parts:
            return HEAD
        if following is None and place[0] != ROOT and EMBEDDING in self._wrapping.parts:
            return EMBEDDING
        return following

    def _reshards(self, place: Place) -> bool:
        """Whether a unit's parameters are freed after forward and gathered again for backward."""
        part = self._wrapping.parts.get(place)
        return self._reshard and not (part is not None and part.keeps)

    def post_backward(self, ledger: Ledger, place: Place, gradient_bytes: int) -> None:
        """Reduce and drop the unit's gradients. While that is deferred, they stay where autograd adds to them."""
        unit = self._units[place]
        self._free(ledger, place)
        if not self._reduces:
            return
        ledger.add(COMMUNICATION, -self._reducing)
        ledger.add(COMMUNICATION, unit.reduce_input)
        self._reducing = unit.reduce_input
        by_parameter = self._plan.defers_reduction or (place[0] == ROOT and HEAD in self._wrapping.parts)
        ledger.add(UNSHARDED_GRADIENTS, -(unit.whole_gradients if by_parameter else gradient_bytes))
        ledger.add(COMMUNICATION, unit.reduce_output.rounded)
        output = unit.gradients.rounded
        ledger.add(GRADIENTS, output)
        if self._plan.replica_degree > 1:
            self._all_reduced = self._reduce_outputs  # kept until the backward's end, for other streams' sake
        else:
            ledger.add(COMMUNICATION, -unit.reduce_output.rounded)
        if (self._accumulating and not self._plan.defers_reduction) or self._offload:
            ledger.add(GRADIENTS, -output)

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int, gradient_bytes: int) -> None:
        """From the second micro-batch on, whole gradients are added to those that stayed."""
        if self._accumulating:
            ledger.add(UNSHARDED_GRADIENTS, -gradient_bytes)

    def end_backward(self, ledger: Ledger, root_gradient_bytes: int) -> None:
        """What was not reduced on the way is reduced by a final callback of autograd, which still holds the loss's gradient."""
        ledger.add(LOSS, ALIGNMENT)
        for place in self._wrapping.last:
            if self._units[place].shards:
                self.post_backward(ledger, place, root_gradient_bytes)
        ledger.add(LOSS, -ALIGNMENT)
        ledger.add(COMMUNICATION, -self._reducing - self._all_reduced)
        self._reducing = self._all_reduced = 0

    def optimizer_step(self, ledger: Ledger) -> None:
        if self._offload:
            return
        high = optimizer_temporaries(self._profile, self._plan, lambda p: shard_shape(p.shape, self._plan.shard_degree))
        ledger.add(TEMPORARIES, high)
        ledger.add(TEMPORARIES, -high)

    # Gathering

    def _gather(self, ledger: Ledger, place: Place) -> None:
        """`FSDPParamGroup.unshard`: copy in and all-gather; the output waits for the copy-out."""
        unit = self._units[place]
        if self._alone:
            return
        inputs = unit.gather_input
        if self._offload:
            inputs = self._upload(ledger, unit)
        else:
            ledger.add(COMMUNICATION, inputs)
        ledger.add(COMMUNICATION, unit.gather_output)
        ledger.add(COMMUNICATION, -inputs)

    def _upload(self, ledger: Ledger, unit: UnitBytes) -> int:
        """With offload each shard is copied to the GPU, then cast: all inputs live until the all-gather is issued."""
        held = 0
        for elements in unit.shards:
            full = round_up(elements * self._plan.param_bytes)
            ledger.add(COMMUNICATION, full)
            held += full
            if self._casts:
                cast = round_up(elements * self._plan.compute_bytes)
                ledger.add(COMMUNICATION, cast)
                ledger.add(COMMUNICATION, -full)
                held += cast - full
        return held

    def _copy_out(self, ledger: Ledger, place: Place, *, forward: bool) -> None:
        """`FSDPParamGroup.wait_for_unshard`: in forward the all-gather's output is kept until the next unit's copy-out is done."""
        unit = self._units[place]
        if self._alone:
            self._copy_alone(ledger, unit)
            return
        ledger.add(UNSHARDED_PARAMETERS, unit.unsharded)
        if forward:
            ledger.add(COMMUNICATION, -self._held_output)
            self._held_output = unit.gather_output
        else:
            ledger.add(COMMUNICATION, -unit.gather_output)

    def _copy_alone(self, ledger: Ledger, unit: UnitBytes) -> None:
        """World size 1: each parameter is brought to the GPU, cast and copied; the last cast lives while the next is made."""
        held = 0
        for elements in unit.shards:
            n_bytes = round_up(elements * self._plan.compute_bytes)
            full = round_up(elements * self._plan.param_bytes) if self._offload else 0
            ledger.add(COMMUNICATION, full)
            if self._casts:
                ledger.add(COMMUNICATION, n_bytes)
                ledger.add(COMMUNICATION, -held - full)
                held = n_bytes
            elif full:
                ledger.add(COMMUNICATION, -held)
                held = full
            ledger.add(UNSHARDED_PARAMETERS, n_bytes)
        ledger.add(COMMUNICATION, -held)

    def _free(self, ledger: Ledger, place: Place) -> None:
        ledger.add(UNSHARDED_PARAMETERS, -self._units[place].unsharded)


def optimizer_temporaries(profile: Profile, plan: Plan, shape_of: Callable[[Parameter], tuple[int, ...]]) -> int:
    """What the optimizer's step allocates over all trainable parameters, `shape_of` each on this rank."""
    if plan.optim == "adafactor":
        largest = max(
            (shape_of(p) for _, u, _ in places(profile) for p in u.parameters if p.trainable), key=prod, default=(0,)
        )
        return optimizers.step_temporaries(plan.optim, [largest], plan.param_bytes)

    def of(unit: Unit) -> Held:
        shapes = [shape_of(p) for p in unit.parameters if p.trainable]
        n_bytes = optimizers.step_temporaries(plan.optim, shapes, plan.param_bytes)
        return Held(n_bytes, n_bytes)

    return total(profile, of).rounded


def padding_warnings(profile: Profile, plan: Plan) -> list[str]:
    """The parameter that costs every rank far more than its fair share, because FSDP2 splits and pads dim 0 alone."""
    shards = plan.shard_degree
    excess = 0
    worst: Parameter | None = None
    for _, unit, count in places(profile):
        for parameter in unit.parameters:
            more = (prod(shard_shape(parameter.shape, shards)) * shards - parameter.elements) * count
            if more > excess:
                excess, worst = more, parameter
    if worst is None or excess < profile.parameters // 100:
        return []
    rows = worst.shape[0] if worst.shape else 1
    times = -(-rows // shards) * shards / rows
    return [
        f"{worst.name} {list(worst.shape)} is split on its dim 0 of {rows} over {shards} ranks: "
        f"every rank keeps and gathers {times:.1f} times its fair share"
    ]
