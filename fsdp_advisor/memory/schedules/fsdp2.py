"""PyTorch FSDP2: `fully_shard` on each layer and on the root, `reshard_after_forward` the same for all of them.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParam._init_sharded_param` (dim-0 chunks, padded),
`foreach_all_gather`, `FSDPParamGroup.wait_for_unshard`, `post_backward`, `foreach_reduce`, `FSDPState._post_forward`.
Inputs and outputs of all-gathers are allocated on the copy-in stream, outputs of reduce-scatters on theirs, the rest on the
compute stream; streams wait for one another by events, so nothing is held back (no `record_stream`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fsdp_advisor.memory import optimizers
from fsdp_advisor.memory.held import ALIGNMENT, NOTHING, Held, States
from fsdp_advisor.memory.ledger import (
    AT_ROOT,
    COMMUNICATION,
    COPY_IN,
    GRADIENTS,
    LOSS,
    NONE_ALIVE,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    REDUCE_SCATTER,
    TEMPORARIES,
    UNSHARDED_PARAMETERS,
    Alive,
    Ledger,
    Place,
)
from fsdp_advisor.memory.schedules.units import buffers, per_unit, places, summed, total
from fsdp_advisor.models.profile import Parameter, Profile, Unit
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
    """One unit's storages on rank 0."""

    parameters: Held
    optimizer: Held
    gradients: Held  # one storage: the reduce-scatter's output, of which the sharded gradients are views
    gather_input: (
        Held  # flat copy of the shards in the compute dtype; nothing where the shards are gathered as they are
    )
    gather_output: Held
    unsharded: Held  # the gathered parameters, one storage each, padded
    reduce_input: Held
    shards: tuple[int, ...]  # elements of each parameter's local shard, for world size 1 and offload


class Fsdp2Schedule:
    grad_marks = False
    made_by_first_step = frozenset({OPTIMIZER})

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self._offload = plan.offload == "parameters"
        self._reshard = plan.strategy in ("zero3", "hsdp")
        self._alone = plan.shard_degree == 1
        self._casts = plan.mixed
        self._units = per_unit(profile, self._measure)
        self.states = self._states()

    def _measure(self, unit: Unit) -> UnitBytes:
        plan, n = self._plan, self._plan.shard_degree
        shapes = [shard_shape(p.shape, n) for p in unit.parameters]
        locals_ = [prod(s) for s in shapes]
        elements = sum(locals_)
        reduced = 0
        parameters = optimizer = unsharded = NOTHING
        for parameter, shape, e in zip(unit.parameters, shapes, locals_, strict=True):
            parameters += Held.of(e * plan.param_bytes)
            unsharded += Held.of(e * n * plan.compute_bytes)
            if parameter.trainable:
                optimizer += optimizers.kept(plan.optim, shape, plan.param_bytes)
                reduced += e
        return UnitBytes(
            parameters=parameters,
            optimizer=optimizer,
            gradients=Held.of(reduced * plan.param_bytes),
            gather_input=Held.of(elements * plan.compute_bytes) if self._casts and not self._offload else NOTHING,
            gather_output=Held.of(elements * n * plan.compute_bytes),
            unsharded=unsharded,
            reduce_input=Held.of(reduced * n * plan.param_bytes),
            shards=tuple(locals_),
        )

    def _states(self) -> States:
        if self._offload:
            return States(buffers=buffers(self._profile))
        return States(
            parameters=summed(self._profile, self._units, "parameters"),
            gradients=summed(self._profile, self._units, "gradients"),
            optimizer=summed(self._profile, self._units, "optimizer"),
            buffers=buffers(self._profile),
        )

    # The step

    def begin_step(self, ledger: Ledger) -> None:
        ledger.born(PARAMETERS, self.states.parameters)
        ledger.born(OPTIMIZER, self.states.optimizer)
        ledger.born(OTHER, self.states.buffers)
        self._prefetched = False
        self._gathered = NONE_ALIVE  # an all-gather's output that has not been copied out
        self._held_output = NONE_ALIVE  # forward keeps the last all-gather's output until the next copy-out
        self._reducing = NONE_ALIVE  # the last reduce-scatter's input lives until the next one's
        self._unsharded: defaultdict[Place, list[Alive]] = defaultdict(list)

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._accumulating = index > 0

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        self._gather(ledger, place)
        self._copy_out(ledger, place, forward=True)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        if self._reshard:
            self._free(ledger, place)
        if place == AT_ROOT:
            ledger.died(self._held_output)
            self._held_output = NONE_ALIVE

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if not self._reshard:
            return
        if not self._prefetched:
            self._gather(ledger, place)
        self._copy_out(ledger, place, forward=False)
        self._prefetched = following is not None
        if following is not None:
            self._gather(ledger, following)

    def post_backward(self, ledger: Ledger, place: Place) -> None:
        unit = self._units[place]
        self._free(ledger, place)
        ledger.died(self._reducing)
        self._reducing = ledger.born(COMMUNICATION, unit.reduce_input)
        ledger.died(ledger.gradients_of(place))
        output = ledger.born(GRADIENTS, unit.gradients, REDUCE_SCATTER)
        if self._accumulating or self._offload:
            ledger.died(output)

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None:
        pass

    def end_backward(self, ledger: Ledger) -> None:
        """The root's turn is a final callback of autograd, which still holds the loss's gradient."""
        gradient = ledger.born(LOSS, Held.of(ALIGNMENT))
        self.post_backward(ledger, AT_ROOT)
        ledger.died(gradient)
        ledger.died(self._reducing)
        self._reducing = NONE_ALIVE

    def optimizer_step(self, ledger: Ledger) -> None:
        if self._offload:
            return
        shards = self._plan.shard_degree
        temporaries = optimizer_temporaries(self._profile, self._plan, lambda p: shard_shape(p.shape, shards))
        ledger.died(ledger.born(TEMPORARIES, temporaries))

    # Gathering

    def _gather(self, ledger: Ledger, place: Place) -> None:
        """`FSDPParamGroup.unshard`: copy in and all-gather; the output waits for the copy-out."""
        if self._alone:
            return
        unit = self._units[place]
        if self._offload:
            inputs = self._upload(ledger, unit)
        else:
            inputs = [ledger.born(COMMUNICATION, unit.gather_input, COPY_IN)]
        self._gathered = ledger.born(COMMUNICATION, unit.gather_output, COPY_IN)
        for shard in inputs:
            ledger.died(shard)

    def _upload(self, ledger: Ledger, unit: UnitBytes) -> list[Alive]:
        """With offload each shard is copied to the GPU, then cast: all inputs live until the all-gather is issued."""
        inputs = []
        for elements in unit.shards:
            shard = ledger.born(COMMUNICATION, Held.of(elements * self._plan.param_bytes), COPY_IN)
            if self._casts:
                cast = ledger.born(COMMUNICATION, Held.of(elements * self._plan.compute_bytes), COPY_IN)
                ledger.died(shard)
                shard = cast
            inputs.append(shard)
        return inputs

    def _copy_out(self, ledger: Ledger, place: Place, *, forward: bool) -> None:
        """`FSDPParamGroup.wait_for_unshard`: in forward the all-gather's output is kept until the next unit's copy-out is done."""
        unit = self._units[place]
        if self._alone:
            self._copy_alone(ledger, place)
            return
        self._unsharded[place].append(ledger.born(UNSHARDED_PARAMETERS, unit.unsharded))
        if forward:
            ledger.died(self._held_output)
            self._held_output = self._gathered
        else:
            ledger.died(self._gathered)
        self._gathered = NONE_ALIVE

    def _copy_alone(self, ledger: Ledger, place: Place) -> None:
        """World size 1: each parameter is brought to the GPU, cast and copied; the last one lives while the next is made."""
        last = NONE_ALIVE
        numbers: tuple[int, ...] = ()
        n_bytes = 0
        for elements in self._units[place].shards:
            compute = Held.of(elements * self._plan.compute_bytes)
            fresh = NONE_ALIVE
            if self._offload:
                fresh = ledger.born(COMMUNICATION, Held.of(elements * self._plan.param_bytes))
            if self._casts:
                cast = ledger.born(COMMUNICATION, compute)
                ledger.died(fresh)
                fresh = cast
            ledger.died(last)
            last = fresh
            _, born_bytes, born = ledger.born(UNSHARDED_PARAMETERS, compute)
            n_bytes, numbers = n_bytes + born_bytes, numbers + born
        ledger.died(last)
        self._unsharded[place].append((UNSHARDED_PARAMETERS, n_bytes, numbers))

    def _free(self, ledger: Ledger, place: Place) -> None:
        ledger.died(self._unsharded[place].pop())


def optimizer_temporaries(profile: Profile, plan: Plan, shape_of: Callable[[Parameter], tuple[int, ...]]) -> Held:
    """What the optimizer's step allocates over all trainable parameters, `shape_of` each on this rank."""
    if plan.optim == "adafactor":
        largest = max(
            (shape_of(p) for _, u, _ in places(profile) for p in u.parameters if p.trainable), key=prod, default=(0,)
        )
        return optimizers.step_temporaries(plan.optim, [largest], plan.param_bytes)

    def of(unit: Unit) -> Held:
        shapes = [shape_of(p) for p in unit.parameters if p.trainable]
        return optimizers.step_temporaries(plan.optim, shapes, plan.param_bytes)

    return total(profile, of)


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
