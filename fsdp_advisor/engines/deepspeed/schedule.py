"""DeepSpeed ZeRO-1, 2 and 3: the timeline of a step, laid over the tape of the plain model.

Stages 1 and 2 leave forward alone. Gradients are moved, as they become ready, into one bucket, and what it holds is reduced
when the next one does not fit. Stage 3 does the same, and gathers parameters module by module (`memory.deepspeed_zero3`).
The arithmetic, with its sources, is in `memory.deepspeed`; what happens when was read in zero/stage_1_and_2.py
(`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`, `copy_grads_in_partition`,
`independent_gradient_partition_epilogue`) and zero/stage3.py (`__add_grad_to_ipg_bucket`, `partition_grads`, `step`).

The bucket and what is gathered span many layers, so no layer is jumped over in backward (stages 2, 3) and forward (stage 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdp_advisor.engines.deepspeed import buffers as deepspeed_step
from fsdp_advisor.engines.deepspeed import partitions as deepspeed
from fsdp_advisor.engines.deepspeed.buffers import Buffers, Filled
from fsdp_advisor.engines.deepspeed.coordinator import Gathered, gathered
from fsdp_advisor.engines.deepspeed.gathering import Gathering
from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import Settings, offloads_parameters, settings_of, stage
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
    REDUCE_SCATTER,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    Alive,
    Ledger,
    Place,
)
from fsdp_advisor.memory.storages import NO_STORAGES, States, Storages, round_up
from fsdp_advisor.model.profile import Parameter, Profile


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient: `start` is its place in the flat buffer, from its unit's beginning (the root's: from 0)."""

    start: int
    elements: int
    padded: int  # to the ranks
    n_bytes: int
    oversized: bool  # larger than the bucket: it stays where autograd put it until it is reduced


@dataclass(frozen=True, eq=False)
class _Arithmetic:
    """What a plan comes to whatever B, T and the kernels are. Computed once per such plan."""

    states: States
    parameters: Storages  # of the states, without what is released at the optimizer step
    buffers: Buffers
    gradients: dict[Place, tuple[Gradient, ...]]  # by parameter of the unit
    starts: tuple[tuple[int, ...], ...]  # by stack and layer: where it begins in the flat buffer
    boundary: tuple[tuple[int, int], ...]  # stage 1: (account, bytes) once the last backward is over


@lru_cache(maxsize=384)
def _arithmetic(profile: Profile, plan: Plan, settings: Settings) -> _Arithmetic:
    buffers = deepspeed_step.buffers(profile, plan, settings)
    gradients, starts = _layout(profile, plan, buffers)
    states = deepspeed.states(profile, plan, settings)
    return _Arithmetic(
        states=states,
        parameters=deepspeed.shards(profile, plan) if buffers.sharded else states.parameters,
        buffers=buffers,
        gradients=gradients,
        starts=starts,
        boundary=_boundary(profile, plan, buffers) if buffers.whole_gradients else (),
    )


@lru_cache(maxsize=8)
def _gathered_storages(profile: Profile, plan: Plan, settings: Settings) -> Gathered:
    return gathered(profile, plan, settings)


@lru_cache(maxsize=256)
def _gathered_levels(profile: Profile, plan: Plan, settings: Settings) -> Gathered:
    return gathered(profile, plan, settings).levels


def _layout(
    profile: Profile, plan: Plan, buffers: Buffers
) -> tuple[dict[Place, tuple[Gradient, ...]], tuple[tuple[int, ...], ...]]:
    """The gradients of each unit, and where in the flat buffer each real layer begins."""

    def measure(parameters: tuple[Parameter, ...], at: int) -> tuple[Gradient, ...]:
        result = []
        for p in parameters:
            padded = plan.shard_degree * shard_elements(p.elements, plan.shard_degree)
            n_bytes = round_up(buffers.gradient_bytes * p.elements)
            result.append(Gradient(at, p.elements, padded, n_bytes, p.elements > buffers.bucket_elements))
            at += p.elements if p.trainable else 0
        return tuple(result)

    gradients: dict[Place, tuple[Gradient, ...]] = {}
    root: tuple[Gradient, ...] = ()
    starts = []
    at = done = 0
    for s, (stack, before) in enumerate(zip(profile.stacks, profile.order, strict=True)):
        root += measure(profile.root.parameters[done:before], at)
        at += sum(p.elements for p in profile.root.parameters[done:before] if p.trainable)
        done = before
        lengths = []
        for n, unit in enumerate(stack.units):
            gradients[s, n] = measure(unit.parameters, 0)
            lengths.append(unit.trainable_elements)
        begins = []
        for run in stack.runs:
            for recorded in run.pattern * run.repeats:
                begins.append(at)
                at += lengths[recorded]
        starts.append(tuple(begins))
    gradients[AT_ROOT] = root + measure(profile.root.parameters[done:], at)
    return gradients, tuple(starts)


def _boundary(profile: Profile, plan: Plan, buffers: Buffers) -> tuple[tuple[int, int], ...]:
    """What `_at_boundary` comes to, as births and deaths of bytes; deaths in a row are one."""
    bucket = _Bucket(buffers, plan.shard_degree)
    bucket.boundary = True
    bucket.bucket = (COMMUNICATION, 0, ())  # there already
    events = _Events()

    def whole(at: int, parameter: Parameter) -> Alive:
        return UNSHARDED_GRADIENTS, round_up(buffers.gradient_bytes * parameter.elements), ()

    _at_boundary(profile, bucket, events, whole)
    return tuple(events.changes)


def _at_boundary(profile: Profile, bucket: _Bucket, ledger: Ledger, whole: Callable[[int, Parameter], Alive]) -> None:
    """Stage 1 when the last backward is over: whole gradients go through the bucket in the order of the parameters."""
    at = 0
    for p in profile.in_order():
        if p.trainable:
            alive = whole(at, p)
            gradient = Gradient(0, p.elements, 0, alive[1], p.elements > bucket.buffers.bucket_elements)
            bucket.take(ledger, at, gradient, alive)
            at += p.elements
    bucket.reduce(ledger)


class _Events(Ledger):
    """A ledger that remembers what was added to it; deaths in a row are one."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []

    def add(self, account: int, n_bytes: int) -> None:
        if not n_bytes:
            return
        if n_bytes < 0 and self.changes and self.changes[-1][1] < 0 and self.changes[-1][0] == account:
            n_bytes += self.changes.pop()[1]
        self.changes.append((account, n_bytes))


class _Bucket:
    """What gradients are moved into and reduced from. Source: the `ipg_buckets` of both optimizers."""

    def __init__(self, buffers: Buffers, ranks: int) -> None:
        self.buffers, self._ranks = buffers, ranks
        self.filled = Filled()
        self.bucket: Alive | None = None  # stages 1, 2: the bucket itself
        self.boundary = False  # the last micro-batch
        self.averaged: Alive | None = None  # stages 1, 2: rank 0's own gradients of this micro-batch
        self.oversized: Alive | None = None  # one that did not fit in
        self._stream = REDUCE_SCATTER if buffers.sharded else COMPUTE  # stage 3 alone overlaps by default
        self._offloading: dict[tuple[int, bool], Storages] = {}

    def begin(self, *, boundary: bool) -> None:
        self.boundary, self.averaged = boundary, None

    def setup(self, ledger: Ledger) -> None:
        if self.bucket is None:
            self.bucket = ledger.born(COMMUNICATION, self.buffers.bucket)

    def release(self, ledger: Ledger) -> None:
        if self.bucket is not None:
            ledger.died(self.bucket)
            self.bucket = None

    def full(self, elements: int) -> bool:
        """Whether what is filled in must be reduced before a gradient of so many elements is taken."""
        return self.filled.elements + elements > self.buffers.bucket_elements

    def own(self, start: int, elements: int) -> int:
        """How much of a gradient rank 0 keeps."""
        if self.buffers.sharded:
            return shard_elements(elements, self._ranks)
        return max(0, min(elements, self.buffers.partition_elements - start))

    def take(self, ledger: Ledger, start: int, gradient: Gradient, alive: Alive) -> None:
        """One gradient, which is alive; it dies here unless it is oversized."""
        if self.full(gradient.elements):
            self.reduce(ledger)
        if gradient.oversized:
            self.oversized = alive
            if self.clones_oversized:
                self.oversized = ledger.born(UNSHARDED_GRADIENTS, Storages.of(gradient.n_bytes))
                ledger.died(alive)
        else:
            ledger.died(alive)
        self.filled.put(start, gradient.elements, gradient.padded, self.own(start, gradient.elements))

    def transients(self) -> tuple[int, Storages]:
        """What a reduction takes at its highest and gives back: (bytes of the flat copy, temporaries)."""
        if not self.filled.count:
            return 0, NO_STORAGES
        copy = round_up(self.buffers.copy_bytes(self.filled, self._ranks))
        own = self.filled.largest_own
        if not own or not self.buffers.offload_cast_bytes:
            return copy, NO_STORAGES
        known = self._offloading.get((own, self.boundary))
        if known is None:
            known = self._offloading[own, self.boundary] = self._offload_bytes(own)
        return copy, known

    def _offload_bytes(self, own: int) -> Storages:
        """Before the last micro-batch stage 3 brings back what is on the host; stages 1, 2 copy in place."""
        if self.boundary:
            return self.buffers.offload_temporaries(own)
        return Storages.of(self.buffers.gradient_bytes * own) if self.buffers.sharded else NO_STORAGES

    @property
    def clones_oversized(self) -> bool:
        """Stages 1 and 2 with offload give an oversized gradient a storage of its own."""
        return not self.buffers.sharded and self.buffers.offload_cast_bytes > 0

    @property
    def bears_averaged(self) -> bool:
        return self.averaged is None and self.buffers.averaged.rounded > 0

    def reduce(self, ledger: Ledger) -> None:
        """Reduce what is filled in, and keep rank 0's part."""
        if not self.filled.count:
            return
        copy_bytes, temporaries = self.transients()
        copy = ledger.born(COMMUNICATION, Storages.of(copy_bytes), self._stream)
        if not self.buffers.sharded:  # the copy is gone before gradients are moved on
            ledger.died(copy)
        ledger.died(ledger.born(TEMPORARIES, temporaries, self._stream))
        if self.buffers.sharded:
            ledger.died(copy)
        if self.bears_averaged and self.filled.largest_own:
            self.averaged = ledger.born(GRADIENTS, self.buffers.averaged)
        if self.oversized is not None and not self._kept_until_the_end:
            ledger.died(self.oversized)
        self.oversized = None
        self.filled.clear()

    @property
    def _kept_until_the_end(self) -> bool:
        """An oversized gradient that is still `param.grad` after its reduction."""
        buffers, owned = self.buffers, self.filled.largest_own > 0
        if buffers.sharded:
            return False
        if buffers.whole_gradients:  # stage 1 drops none but its own
            return not owned
        return owned and bool(buffers.offload_cast_bytes) and not self.boundary


class DeepspeedSchedule:
    distinct_micro_batches = 2
    grad_marks = True
    made_by_first_step: frozenset[int] = frozenset()  # masters and moments are made with the engine

    def __init__(self, profile: Profile, plan: Plan, settings: Settings | None = None) -> None:
        settings = settings or settings_of(profile, plan)
        plan = replace(
            plan, micro_batch_size=1, seq_len=1, attention="sdpa", gradient_accumulation_steps=min(plan.gradient_accumulation_steps, 2)
        )  # fmt: skip
        self._profile = profile
        self._last = plan.gradient_accumulation_steps - 1
        self._stage = stage(plan)
        self._plan, self._settings = plan, settings
        self._known = _arithmetic(profile, replace(plan, activation_checkpointing="none"), settings)
        self.states = self._known.states
        self.walk_all = frozenset({1: (), 2: ("backward",), 3: ("forward", "backward")}[self._stage])
        self._bucket = _Bucket(self._known.buffers, plan.shard_degree)

    # The step

    def begin_step(self, ledger: Ledger) -> None:
        self._gathering = Gathering(self._gathered(follows_storages=ledger.follows_storages))
        ledger.born(PARAMETERS, self._known.parameters)
        self._persistent = ledger.born(PARAMETERS, self._known.buffers.released_at_step, ALL_GATHER)
        ledger.born(GRADIENTS, self.states.gradients)
        ledger.born(OPTIMIZER, self.states.optimizer)
        ledger.born(COMMUNICATION, self.states.communication)
        ledger.born(OTHER, self.states.buffers)
        self._whole: dict[int, Alive] = {}
        self._averaged = NONE_ALIVE

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._accumulating = index > 0
        self._bucket.begin(boundary=index == self._last)
        self._left = [len(starts) for starts in self._known.starts]
        self._gathering.begin_forward()
        self._backward = False

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        self._gathering.enter(ledger, place)

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        self._gathering.leave(ledger, place)

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        if not self._backward:
            self._backward = True
            self._gathering.begin_backward()
        if place != AT_ROOT:  # the root's hook comes before the loss's backward, its head's after it
            self._left[place[0]] -= 1
            self._gathering.enter(ledger, place)

    def post_backward(self, ledger: Ledger, place: Place) -> None:
        pass

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None:
        gradient = self._known.gradients[place][parameter]
        alive = ledger.gradient(parameter, place == AT_ROOT, gradient.n_bytes)
        self._gathering.enter_head(ledger)
        self._bucket.setup(ledger)
        if self._stage > 1:
            self._bucket.take(ledger, self._start(place) + gradient.start, gradient, alive)
        elif self._accumulating:
            ledger.died(alive)
        else:
            self._whole[self._start(place) + gradient.start] = alive

    def end_backward(self, ledger: Ledger) -> None:
        self._gathering.end(ledger)
        bucket = self._bucket
        if self._stage == 1:
            if not bucket.boundary:
                return
            self._reduce_whole(ledger)
        else:
            bucket.reduce(ledger)
        bucket.release(ledger)
        ledger.died(ledger.all_gradients())
        if bucket.averaged is not None:
            if self._accumulating and self._stage > 1:  # added to the first one
                ledger.died(bucket.averaged)
            else:
                self._averaged = bucket.averaged
        self._gathering.drop(ledger)

    def _reduce_whole(self, ledger: Ledger) -> None:
        if ledger.follows_storages:
            _at_boundary(self._profile, self._bucket, ledger, lambda at, _: self._whole.pop(at))
            return
        for account, n_bytes in self._known.boundary:
            ledger.add(account, n_bytes)
        self._bucket.averaged = (GRADIENTS, ledger.live[GRADIENTS], ())

    def optimizer_step(self, ledger: Ledger) -> None:
        """The moments say what lives beside the states."""
        ledger.died(self._persistent)
        for moment in self._known.buffers.moments:
            if not moment.gradients.exact:
                self._drop_averaged(ledger)
            ledger.died(ledger.born(TEMPORARIES, moment.temporaries))
        self._drop_averaged(ledger)
        self._persistent = ledger.born(PARAMETERS, self._known.buffers.released_at_step, ALL_GATHER)

    def _drop_averaged(self, ledger: Ledger) -> None:
        ledger.died(self._averaged)
        self._averaged = NONE_ALIVE

    def _gathered(self, *, follows_storages: bool) -> Gathered:
        """Stage 3's, which depends on the few things of a plan that are kept here."""
        if self._stage < 3:
            return Gathered((), ())
        plan = self._plan
        plan = Plan(
            strategy=plan.strategy,
            backend=plan.backend,
            offload=plan.offload if offloads_parameters(plan) else "none",
            shard_degree=plan.shard_degree,
            precision="fp32" if plan.precision == "fp32" else "bf16",  # in which it computes
            seq_len=1,
            activation_checkpointing=plan.activation_checkpointing,
        )
        if follows_storages:
            return _gathered_storages(self._profile, plan, self._settings)
        return _gathered_levels(self._profile, plan, self._settings)

    def _start(self, place: Place) -> int:
        return 0 if place == AT_ROOT else self._known.starts[place[0]][self._left[place[0]]]
