"""PyTorch FSDP1 (`FullyShardedDataParallel`, `use_orig_params=True`, a unit per layer and the root).

Source: torch.distributed.fsdp._flat_param (`_init_flat_param_and_metadata`, `pre_unshard`, `unshard`, `post_unshard`) and
_runtime_utils (`_post_forward_reshard`, `_pre_backward_hook`, `_post_backward_hook`, `_reduce_grad`), torch 2.13.
What is allocated on one stream and used on another is held back by `record_stream` until the GPU is done with it; the host
runs ahead of the GPU by at most two all-gathers (`_unshard` and `_reshard` with `_FreeEventQueue`, _limiter_utils).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdp_advisor.engines.units import buffers, per_unit, summed
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.ledger import (
    ALL_GATHER,
    AT_ROOT,
    COMMUNICATION,
    COMPUTE,
    GRADIENTS,
    NONE_ALIVE,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    PRE_UNSHARD,
    REDUCE_SCATTER,
    TEMPORARIES,
    UNSHARDED_PARAMETERS,
    Alive,
    Ledger,
    Place,
)
from fsdp_advisor.memory.storages import NO_STORAGES, States, Storages
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.clipping import CLIP_NORM_BYTES
from fsdp_advisor.policies.optimizers import optimizer_named

ALIGNMENT_BYTES = 16
MAX_INFLIGHT_ALL_GATHERS = 2
"""Source: torch.distributed.fsdp._limiter_utils, _FreeEventQueue."""


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
    """One unit's storages on rank 0."""

    shard: Storages
    optimizer: Storages
    optimizer_temporaries: Storages
    gathered_shard: Storages  # where it is made anew to be gathered: in the compute dtype, or brought from the host
    uploaded_shard: Storages  # on its way from the host to the compute dtype
    unsharded: Storages
    reduce_input: Storages  # the gradient in the reduce dtype; nothing where it already is
    reduce_output: Storages  # where it is not what becomes of the gradients, which have another dtype
    norms: Storages  # one scalar for each parameter of which there is something in the shard
    gradients: Storages
    initial: Storages  # made before the first forward and emptied at once (`init_flat_param_attributes`)


def _measure(unit: Unit, plan: Plan) -> UnitBytes:
    alone = plan.shard_degree == 1
    numels = [p.elements for p in unit.parameters]
    elements = flat_elements(numels, plan.compute_bytes, plan.shard_degree)
    local = elements // plan.shard_degree
    pieces = first_shard(numels, plan.compute_bytes, local)
    optimizer = temporaries = norms = NO_STORAGES
    stepping = optimizer_named(plan.optim)
    for parameter, piece in zip(unit.parameters, pieces, strict=True):
        if parameter.trainable and piece:
            norms += Storages.of(CLIP_NORM_BYTES)
            optimizer += stepping.state_storages(parameter, (piece,), plan.param_bytes)
            if not stepping.steps_one_by_one(plan.framework):
                temporaries += stepping.step_temporaries(parameter, (piece,), plan.param_bytes, plan.framework)
    casts = plan.reduce_bytes != plan.compute_bytes and not alone
    reduces_low = plan.reduce_bytes != plan.param_bytes and not alone
    initial = Storages.of(local * plan.compute_bytes) if plan.mixed else NO_STORAGES
    if not alone:
        initial += Storages.of(elements * plan.compute_bytes)
        initial += Storages.of(elements * plan.param_bytes) if plan.mixed else NO_STORAGES
    offload = plan.offload == "parameters"
    return UnitBytes(
        shard=Storages.of(local * plan.param_bytes),
        optimizer=optimizer,
        optimizer_temporaries=temporaries,
        gathered_shard=Storages.of(local * plan.compute_bytes)
        if (not alone if plan.mixed else offload)
        else NO_STORAGES,
        uploaded_shard=Storages.of(local * plan.param_bytes) if plan.mixed and offload else NO_STORAGES,
        unsharded=Storages.of(elements * plan.compute_bytes) if plan.mixed or not alone else NO_STORAGES,
        reduce_input=Storages.of(elements * plan.reduce_bytes) if casts else NO_STORAGES,
        reduce_output=Storages.of(local * plan.reduce_bytes) if reduces_low else NO_STORAGES,
        norms=norms,
        gradients=Storages.of(local * plan.param_bytes),
        initial=initial,
    )


@lru_cache(maxsize=384)
def _measured(profile: Profile, plan: Plan) -> tuple[Mapping[Place, UnitBytes], States]:
    """Of any batch: the units' bytes, and what is kept of them."""
    units = per_unit(profile, lambda unit: _measure(unit, plan))
    # MixedPrecision's buffer_dtype: floating-point buffers are cast for good before the first forward (`_lazy_init`)
    states = States(buffers=buffers(profile, plan.compute_bytes if plan.mixed else None))
    if plan.offload != "parameters":
        root_last = [*[NO_STORAGES] * len(profile.stacks), units[AT_ROOT].shard]
        states = replace(
            states,
            parameters=summed(profile, units, "shard", root_last),
            gradients=summed(profile, units, "gradients"),
            optimizer=summed(profile, units, "optimizer"),
        )
    return units, states


def tried(profile: Profile, plan: Plan) -> Storages:
    """What the first forward makes on the compute stream and empties at once, one after the other, before anything else."""
    units, _ = _measured(profile, plan.any_batch)
    return summed(profile, units, "initial")


class Fsdp1Schedule:
    made_by_first_step = frozenset({OPTIMIZER, GRADIENTS})
    walk_all: frozenset[str] = frozenset()

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._plan = plan
        self._profile = profile
        self._offload = plan.offload == "parameters"
        self._reshard = plan.strategy in ("zero3", "hsdp")
        self._alone = plan.shard_degree == 1
        self._uploads = self._offload and not plan.mixed  # `flat_param_to`, where else `_use_low_precision_shard`
        self._uploads_whole = self._uploads and self._alone
        self.grad_marks = False
        self.distinct_micro_batches = 3 if plan.defers_reduction else 2
        self._units, self.states = _measured(profile, plan.any_batch)
        self._prefetched = False

    def begin_step(self, ledger: Ledger) -> None:
        ledger.born(PARAMETERS, self.states.parameters)
        ledger.born(OPTIMIZER, self.states.optimizer)
        ledger.born(OTHER, self.states.buffers)
        # NO_SHARD keeps autograd's own
        made_on = ALL_GATHER if self._alone and not self._plan.mixed else REDUCE_SCATTER
        self._stale: Alive | None = ledger.born(GRADIENTS, self.states.gradients, made_on)
        self._prefetched = False
        self._unsharded: defaultdict[Place, list[tuple[Alive, Alive]]] = defaultdict(list)
        self._whole: defaultdict[Place, deque[Alive]] = defaultdict(deque)  # gradients whose reduction is deferred
        self._offloaded: list[Alive] = []
        self._freed: deque[int] = deque()

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._index = index
        last = index == min(self._plan.gradient_accumulation_steps, self.distinct_micro_batches) - 1
        self._reduces = last or not self._plan.defers_reduction

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        if (
            self._stale is not None
        ):  # `zero_grad` does not reach the flat gradients: `_reset_flat_param_grad_info_if_needed` does
            ledger.died(self._stale)
            self._stale = None
        if self._index == 0 or self._reshard or not self._plan.defers_reduction:
            self._unshard(ledger, place)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        """The root keeps its parameters until backward needs them (`_post_forward_reshard`); and NO_SHARD's, brought from the host
        for each pass, stay where autograd has saved them.
        """
        if self._reshard and place != AT_ROOT and not self._uploads_whole:
            self._free(ledger, place)

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if not self._reshard:
            return
        if (place != AT_ROOT or self._uploads_whole) and not self._prefetched:
            self._unshard(ledger, place)
        self._following = following
        self._prefetched = following is not None and self._plan.backward_prefetch == "pre"
        if self._prefetched and following is not None:
            self._unshard(ledger, following)

    def post_backward(self, ledger: Ledger, place: Place) -> None:
        """Reduce and drop the unit's gradient. While that is deferred it stays, and so do parameters not resharded after
        forward. (`_should_free_in_backward`)
        """
        unit = self._units[place]
        if self._reduces or self._reshard:
            self._free(ledger, place)
            if self._uploads_whole:
                self._free(ledger, place)
        if (
            self._reshard
            and self._plan.backward_prefetch == "post"
            and place != AT_ROOT
            and self._following is not None
        ):
            self._prefetched = True
            self._unshard(ledger, self._following)
        gradients = ledger.gradients_of(place)
        if self._alone and not self._plan.mixed:  # NO_SHARD: the flat gradient itself is kept
            if self._index > 0:
                ledger.died(gradients)
            else:
                ledger.turned(gradients, GRADIENTS)
            return
        if self._plan.defers_reduction:
            if self._index == 0:
                self._whole[place].append(gradients)
            else:
                ledger.died(gradients)  # added to what has stayed
            if not self._reduces:
                return
            gradients = self._whole[place].popleft()
        reduce_input = ledger.born(COMMUNICATION, unit.reduce_input, REDUCE_SCATTER)
        reduced = ledger.born(COMMUNICATION, unit.reduce_output, REDUCE_SCATTER)
        output = ledger.born(GRADIENTS, unit.gradients, REDUCE_SCATTER)
        ledger.died(reduced)
        if self._offload:
            self._offloaded.append(output)
        elif self._index > 0 and not self._plan.defers_reduction:
            ledger.died(output)
        ledger.died(reduce_input)
        ledger.died(gradients, used_on=REDUCE_SCATTER)

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None:
        pass

    def end_backward(self, ledger: Ledger) -> None:
        """A sharded gradient that has been copied to the host is dropped here, not sooner. (`_accumulate_sharded_grad`,
        `_offload_grad`, `prepare_gradient_for_optim`)
        """
        if self._offloaded:
            numbers = tuple(number for alive in self._offloaded for number in alive[2])
            ledger.died((GRADIENTS, summed(self._profile, self._units, "gradients").rounded, numbers))
            self._offloaded.clear()

    def optimizer_step(self, ledger: Ledger) -> None:
        if self._plan.clips:
            ledger.died(ledger.born(TEMPORARIES, summed(self._profile, self._units, "norms")))
        if not self._offload:
            ledger.died(ledger.born(TEMPORARIES, summed(self._profile, self._units, "optimizer_temporaries")))

    def _unshard(self, ledger: Ledger, place: Place) -> None:
        """Brought from the host as it is, the shard stays as long as what is gathered: the parameters are views of it.
        (`flat_param_to`)
        """
        unit = self._units[place]
        shard = self._shard(ledger, place)
        if len(self._freed) >= MAX_INFLIGHT_ALL_GATHERS:
            ledger.wait(self._freed.popleft())
        unsharded = ledger.born(UNSHARDED_PARAMETERS, unit.unsharded, ALL_GATHER)
        if not self._uploads:
            ledger.died(shard, used_on=ALL_GATHER)
            shard = NONE_ALIVE
        self._unsharded[place].append((unsharded, shard))

    def _shard(self, ledger: Ledger, place: Place) -> Alive:
        """What is gathered. (`_use_low_precision_shard`)"""
        shard = ledger.born(COMMUNICATION, self._units[place].gathered_shard, PRE_UNSHARD)
        ledger.died(ledger.born(COMMUNICATION, self._units[place].uploaded_shard, PRE_UNSHARD))
        return shard

    def _free(self, ledger: Ledger, place: Place) -> None:
        unsharded, shard = self._unsharded[place].pop()
        ledger.died(unsharded, used_on=COMPUTE)
        self._freed.append(ledger.mark())
        ledger.died(shard, used_on=ALL_GATHER)
