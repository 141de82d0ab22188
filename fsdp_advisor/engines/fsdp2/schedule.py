"""PyTorch FSDP2: `fully_shard` on each layer and on the root, or on what a framework makes of the root (`wrapping`).

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParam._init_sharded_param` (dim-0 chunks, padded),
`foreach_all_gather`, `FSDPParamGroup.wait_for_unshard`, `post_backward`, `foreach_reduce`, `FSDPState._post_forward`.
Inputs and outputs of all-gathers are allocated on the copy-in stream, outputs of reduce-scatters on theirs, the rest on the
compute stream; streams wait for one another by events, so nothing is held back (no `record_stream`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from fsdp_advisor.engines.units import buffers, per_unit, places, root_parts, summed, total
from fsdp_advisor.engines.wrapping import EMBEDDING, HEAD, Part, Wrapping, wrapping_for
from fsdp_advisor.job.plan import Plan
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
from fsdp_advisor.memory.storages import ALIGNMENT, NO_STORAGES, States, Storages, round_up
from fsdp_advisor.model.profile import ROOT, Parameter, Profile, Unit
from fsdp_advisor.policies.clipping import CLIP_NORM_BYTES
from fsdp_advisor.policies.optimizers import optimizer_named


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

    parameters: Storages
    optimizer: Storages
    gradients: Storages  # one storage: the reduce-scatter's output, of which the sharded gradients are views
    gather_input: (
        Storages  # flat copy of the shards in the compute dtype; nothing where the shards are gathered as they are
    )
    gather_output: Storages
    unsharded: Storages  # the gathered parameters, one storage each, padded
    reduce_input: Storages
    reduce_output: Storages  # where it is not what becomes of the gradients, which have another dtype
    shards: tuple[int, ...]  # elements of each parameter's local shard, for world size 1 and offload


def _measure(unit: Unit, plan: Plan) -> UnitBytes:
    n, offload = plan.shard_degree, plan.offload == "parameters"
    shapes = [shard_shape(p.shape, n) for p in unit.parameters]
    locals_ = [prod(s) for s in shapes]
    elements = sum(locals_)
    reduced = 0
    parameters = optimizer = unsharded = NO_STORAGES
    stepping = optimizer_named(plan.optim)
    for parameter, shape, e in zip(unit.parameters, shapes, locals_, strict=True):
        parameters += Storages.of(e * plan.param_bytes)
        unsharded += Storages.of(e * n * plan.compute_bytes)
        if parameter.trainable:
            optimizer += stepping.state_storages(parameter, shape, plan.param_bytes)
            reduced += e
    return UnitBytes(
        parameters=parameters,
        optimizer=optimizer,
        gradients=Storages.of(reduced * plan.param_bytes),
        gather_input=Storages.of(elements * plan.compute_bytes) if plan.mixed and not offload else NO_STORAGES,
        gather_output=Storages.of(elements * n * plan.compute_bytes),
        unsharded=unsharded,
        reduce_input=Storages.of(reduced * n * plan.reduce_bytes),
        reduce_output=Storages.of(reduced * plan.reduce_bytes)
        if plan.reduce_bytes != plan.param_bytes
        else NO_STORAGES,
        shards=tuple(locals_),
    )


@lru_cache(maxsize=384)
def _measured(profile: Profile, plan: Plan) -> tuple[Wrapping, Mapping[Place, UnitBytes], States]:
    """Of any batch: the units, their bytes, and what is kept of them."""
    wrapping = wrapping_for(profile, plan)
    units = {} if wrapping.whole else per_unit(profile, lambda unit: _measure(unit, plan))
    units |= {place: _measure(part.unit, plan) for place, part in wrapping.parts.items()}

    states = States(buffers=buffers(profile))
    if plan.offload != "parameters":
        kept = {what: _summed(profile, wrapping, units, what) for what in ("parameters", "gradients", "optimizer")}
        if len(wrapping.parts) == 1 and not wrapping.whole:  # one by one, in the model's order
            parts = root_parts(profile)
            states_of = [_measure(part, plan) for part in parts]
            weights_of = [_measure(part, plan) for part in _as_filled(parts)]
            kept["parameters"] = summed(profile, units, "parameters", [part.parameters for part in weights_of])
            kept["optimizer"] = summed(profile, units, "optimizer", [part.optimizer for part in states_of])
        states = replace(states, **kept)
    return wrapping, units, states


def _as_filled(root: list[Unit]) -> list[Unit]:
    """`to_empty` fills a tied weight at each of its places: what stays is the last."""
    tied = tuple(p for part in root for p in part.parameters if p.tied)
    parts = [replace(part, parameters=tuple(p for p in part.parameters if not p.tied)) for part in root]
    return [*parts[:-1], replace(parts[-1], parameters=parts[-1].parameters + tied)]


def _summed(profile: Profile, wrapping: Wrapping, units: Mapping[Place, UnitBytes], what: str) -> Storages:
    """Over the root, the layers, and the parts of the root that are units of their own."""
    beside = (getattr(units[place], what) for place in wrapping.parts if place != AT_ROOT)
    rest: Storages = getattr(units[AT_ROOT], what) if wrapping.whole else summed(profile, units, what)
    return sum(beside, rest)


class Fsdp2Schedule:
    made_by_first_step = frozenset({OPTIMIZER})
    walk_all: frozenset[str] = frozenset()

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self._offload = plan.offload == "parameters"
        self._reshard = plan.strategy in ("zero3", "hsdp")
        self._alone = plan.shard_degree == 1
        self._casts = plan.mixed
        self._wrapping, self._units, self.states = _measured(profile, plan.any_batch)
        self.grad_marks = plan.defers_reduction
        self.distinct_micro_batches = 3 if plan.defers_reduction else 2

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
        self._whole: defaultdict[Place, deque[list[Alive]]] = defaultdict(
            deque
        )  # gradients whose reduction is deferred
        self._all_reduced: list[Alive] = []

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._index = index
        last = index == min(self._plan.gradient_accumulation_steps, self.distinct_micro_batches) - 1
        self._reduces = last or not self._plan.defers_reduction

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        if self._has_nothing(place):
            return
        self._gather(ledger, place)
        self._copy_out(ledger, place, forward=True)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        if not self._has_nothing(place) and self._reshards(place):
            self._free(ledger, place)
        if place == AT_ROOT:
            ledger.died(self._held_output)
            self._held_output = NONE_ALIVE

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if self._has_nothing(place) and place != AT_ROOT:
            return
        if self._reshards(place):
            if not self._prefetched:
                self._gather(ledger, place)
            self._copy_out(ledger, place, forward=False)
        target = self._before(place, following)
        self._prefetched = target is not None and self._reshards(target)
        if target is not None and self._prefetched:
            self._gather(ledger, target)

    def post_backward(self, ledger: Ledger, place: Place) -> None:
        """Reduce and drop the unit's gradients. While that is deferred, they stay where autograd adds to them."""
        if self._has_nothing(place):
            return
        unit = self._units[place]
        self._free(ledger, place)
        gradients = self._gradients_of(ledger, place)
        if self._plan.defers_reduction:
            if self._index == 0:
                self._whole[place].append(gradients)
            if not self._reduces:
                return
            gradients = self._whole[place].popleft()
        gradients, last = self._but_the_last(ledger, place, gradients)
        ledger.died(self._reducing)
        self._reducing = ledger.born(COMMUNICATION, unit.reduce_input)
        for gradient in gradients:
            ledger.died(gradient)
        reduced = ledger.born(COMMUNICATION, unit.reduce_output, REDUCE_SCATTER)
        output = ledger.born(GRADIENTS, unit.gradients, REDUCE_SCATTER)
        if self._plan.replica_degree > 1:
            self._all_reduced.append(reduced)  # `FSDPParamGroup._all_reduce_state`
        else:
            ledger.died(reduced)
        ledger.died(last)
        if (self._index > 0 and not self._plan.defers_reduction) or self._offload:
            ledger.died(output)

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None:
        """From the second micro-batch on, gradients are added to those that have stayed."""
        fresh = ledger.gradients_since_mark()
        if self._index > 0:
            ledger.died(fresh)

    def end_backward(self, ledger: Ledger) -> None:
        """What has not been reduced on the way is, in a final callback of autograd, which still holds the loss's gradient."""
        gradient = ledger.born(LOSS, Storages.of(ALIGNMENT))
        for place in self._wrapping.last:
            self.post_backward(ledger, place)
        ledger.died(gradient)
        ledger.died(self._reducing)
        self._reducing = NONE_ALIVE
        if self._all_reduced:
            numbers = tuple(number for alive in self._all_reduced for number in alive[2])
            ledger.died(
                (COMMUNICATION, _summed(self._profile, self._wrapping, self._units, "reduce_output").rounded, numbers)
            )
            self._all_reduced.clear()

    def optimizer_step(self, ledger: Ledger) -> None:
        if self._offload:
            return
        ledger.died(ledger.born(TEMPORARIES, gradient_norms(self._profile, self._plan)))
        shards = self._plan.shard_degree
        temporaries = optimizer_temporaries(self._profile, self._plan, lambda p: shard_shape(p.shape, shards))
        ledger.died(ledger.born(TEMPORARIES, temporaries))

    # Units

    def _has_nothing(self, place: Place) -> bool:
        """A root whose parameters are all in other units; a layer that is no unit."""
        return place not in self._units or not self._units[place].shards

    def _reshards(self, place: Place) -> bool:
        """Whether a unit's parameters are freed after forward and gathered again for backward."""
        part = self._wrapping.parts.get(place)
        return self._reshard and not (part is not None and part.keeps)

    def _before(self, place: Place, following: Place | None) -> Place | None:
        """The unit that ran before this one in forward, which its backward prefetches. `following` is the next layer."""
        if place == AT_ROOT and HEAD in self._wrapping.parts:
            return HEAD
        if self._wrapping.whole:
            return EMBEDDING if place == HEAD and EMBEDDING in self._wrapping.parts else None
        if following is None and place[0] != ROOT and EMBEDDING in self._wrapping.parts:
            return EMBEDDING
        return following

    def _gradients_of(self, ledger: Ledger, place: Place) -> list[Alive]:
        """A unit's gradients; where the root is taken apart, one by one."""
        parts = self._wrapping.parts
        part = parts.get(place)
        if part is None or (HEAD not in parts and not self._wrapping.whole):
            return [ledger.gradients_of(place)]
        if place != AT_ROOT or not self._wrapping.whole:
            return self._single_gradients(ledger, part)
        account, n_bytes, numbers = ledger.all_gradients()
        if self._plan.defers_reduction and self._index > 0:
            return []
        # what has been reduced on the way is gone, unless reduction is deferred
        others = [p for p in parts if p != AT_ROOT and (self._plan.defers_reduction or p in self._wrapping.last)]
        for other in others:
            for _, single_bytes, single in self._single_gradients(ledger, parts[other]):
                n_bytes, numbers = n_bytes - single_bytes, tuple(n for n in numbers if n not in single)
        return [(account, n_bytes, numbers)]

    def _but_the_last(self, ledger: Ledger, place: Place, gradients: list[Alive]) -> tuple[list[Alive], Alive]:
        """A unit's gradients, and apart that of its last parameter, which a loop's variable holds until all is reduced.
        (`foreach_reduce`: `for i, (fsdp_param, unsharded_grad) in ...`, if there is more than one rank)
        """
        if self._alone or not gradients:
            return gradients, NONE_ALIVE
        part = self._wrapping.parts.get(place)
        s, layer = place
        unit = part.unit if part else self._profile.root if place == AT_ROOT else self._profile.stacks[s].units[layer]
        trainable = [
            (index, p)
            for index, p in zip(part.indices if part else range(len(unit.parameters)), unit.parameters, strict=False)
            if p.trainable
        ]
        if not trainable:
            return gradients, NONE_ALIVE
        index, parameter = trainable[-1]
        last = ledger.gradient(index, place[0] == ROOT, round_up(parameter.elements * self._plan.compute_bytes))
        account, n_bytes, numbers = gradients[-1]
        if not {*last[2]} <= {*numbers}:  # of an earlier micro-batch
            return gradients, NONE_ALIVE
        rest = account, n_bytes - last[1], tuple(n for n in numbers if n not in last[2])
        return [*gradients[:-1], rest], last

    def _single_gradients(self, ledger: Ledger, part: Part) -> list[Alive]:
        return [
            ledger.gradient(index, True, round_up(p.elements * self._plan.compute_bytes))
            for index, p in zip(part.indices, part.unit.parameters, strict=False)
            if p.trainable
        ]

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
            shard = ledger.born(COMMUNICATION, Storages.of(elements * self._plan.param_bytes), COPY_IN)
            if self._casts:
                cast = ledger.born(COMMUNICATION, Storages.of(elements * self._plan.compute_bytes), COPY_IN)
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
            compute = Storages.of(elements * self._plan.compute_bytes)
            fresh = NONE_ALIVE
            if self._offload:
                fresh = ledger.born(COMMUNICATION, Storages.of(elements * self._plan.param_bytes))
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


def optimizer_temporaries(profile: Profile, plan: Plan, shape_of: Callable[[Parameter], tuple[int, ...]]) -> Storages:
    """The optimizer's temporaries at the highest point of its step. `shape_of` gives the shape of a parameter on this rank."""
    optimizer = optimizer_named(plan.optim)

    def of_one(parameter: Parameter) -> Storages:
        return optimizer.step_temporaries(parameter, shape_of(parameter), plan.param_bytes, plan.framework)

    if optimizer.steps_one_by_one(plan.framework):
        each = (of_one(p) for _, unit, _ in places(profile) for p in unit.parameters if p.trainable)
        return max(each, key=lambda storages: storages.exact, default=NO_STORAGES)
    return total(profile, lambda unit: sum((of_one(p) for p in unit.parameters if p.trainable), NO_STORAGES))


def gradient_norms(profile: Profile, plan: Plan) -> Storages:
    """What clipping allocates, where there is any: a scalar for each trainable parameter."""
    if not plan.clips:
        return NO_STORAGES
    return total(profile, lambda unit: Storages.of(CLIP_NORM_BYTES, sum(p.trainable for p in unit.parameters)))


def padding_warnings(profile: Profile, plan: Plan) -> list[str]:
    """The parameter that costs every rank far more than its fair share, because FSDP2 splits and pads dim 0 alone."""
    return list(_padding_warnings(profile, plan.shard_degree))


@lru_cache(maxsize=1024)
def _padding_warnings(profile: Profile, shards: int) -> tuple[str, ...]:
    excess = 0
    worst: Parameter | None = None
    for _, unit, count in places(profile):
        for parameter in unit.parameters:
            more = (prod(shard_shape(parameter.shape, shards)) * shards - parameter.elements) * count
            if more > excess:
                excess, worst = more, parameter
    if worst is None or excess < profile.parameters // 100:
        return ()
    rows = worst.shape[0] if worst.shape else 1
    times = -(-rows // shards) * shards / rows
    return (
        f"{worst.name} {list(worst.shape)} is split on its dim 0 of {rows} over {shards} ranks: "
        f"every rank keeps and gathers {times:.1f} times its fair share",
    )
