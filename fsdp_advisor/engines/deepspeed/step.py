"""A step of DeepSpeed ZeRO-1, 2 and 3, over the tape of the plain model.

Stages 1 and 2 do not change forward. Each gradient is copied into one bucket when it is ready; the bucket is reduced when the
next gradient does not fit. Stage 3 does the same, and gathers parameters module by module (`coordinator`).
The arithmetic, with its sources, is in `partitions` and `buffers`. Source of the order of events: zero/stage_1_and_2.py
(`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`, `copy_grads_in_partition`,
`independent_gradient_partition_epilogue`) and zero/stage3.py (`__add_grad_to_ipg_bucket`, `partition_grads`, `step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed import buffers as step_buffers
from fsdp_advisor.engines.deepspeed import partitions
from fsdp_advisor.engines.deepspeed.bucket import Bucket
from fsdp_advisor.engines.deepspeed.buffers import Buffers
from fsdp_advisor.engines.deepspeed.coordinator import Gathered, gathered
from fsdp_advisor.engines.deepspeed.gathering import Gathering
from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import Settings, offloads_parameters, settings_of, stage
from fsdp_advisor.engines.optimizer_work import gpu_step, host_step
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, unit_of
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import StepHooks
from fsdp_advisor.program.instructions import (
    NO_BUFFER,
    AllGather,
    AllReduce,
    BufferId,
    Copy,
    CreateStates,
    HostTransfer,
    PythonHooks,
    ReduceScatter,
    WaitFor,
)
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages, round_up


class Gradient(NamedTuple):
    """A parameter's gradient. `start` is its position in the flat buffer, relative to its unit (for the root: from 0)."""

    start: int
    elements: int
    padded: int  # elements, padded to a multiple of the number of ranks
    n_bytes: int
    oversized: bool  # larger than the bucket: it is reduced in place


@dataclass(frozen=True, eq=False)
class _Layout:
    """The states of a plan and the positions of its gradients in the flat buffer. Independent of B, T and the tape."""

    states: States
    optimizer: partitions.OptimizerStates
    parameters: Storages  # the states' parameters, without those freed during the optimizer step
    buffers: Buffers
    gradients: dict[UnitId, tuple[Gradient, ...]]  # by parameter of the unit
    starts: tuple[tuple[int, ...], ...]  # by stack and real layer: its position in the flat buffer


@lru_cache(maxsize=64)
def _layout_of(profile: Profile, plan: Plan, settings: Settings) -> _Layout:
    buffers = step_buffers.buffers(profile, plan, settings)
    gradients, starts = _gradient_places(profile, plan, buffers)
    states = partitions.states(profile, plan, settings)
    return _Layout(
        states=states,
        optimizer=partitions.optimizer_states(profile, plan, settings),
        parameters=partitions.shards(profile, plan) if buffers.sharded else states.parameters,
        buffers=buffers,
        gradients=gradients,
        starts=starts,
    )


def _gradient_places(
    profile: Profile, plan: Plan, buffers: Buffers
) -> tuple[dict[UnitId, tuple[Gradient, ...]], tuple[tuple[int, ...], ...]]:
    """The gradients of each unit, and the position of each real layer in the flat buffer."""

    def measure(parameters: tuple[Parameter, ...], at: int) -> tuple[Gradient, ...]:
        result = []
        for p in parameters:
            padded = plan.shard_degree * shard_elements(p.elements, plan.shard_degree)
            n_bytes = round_up(buffers.gradient_bytes * p.elements)
            result.append(Gradient(at, p.elements, padded, n_bytes, p.elements > buffers.bucket_elements))
            at += p.elements if p.trainable else 0
        return tuple(result)

    gradients: dict[UnitId, tuple[Gradient, ...]] = {}
    root: tuple[Gradient, ...] = ()
    starts = []
    at = done = 0
    for s, (stack, before) in enumerate(zip(profile.stacks, profile.order, strict=True)):
        root += measure(profile.root.parameters[done:before], at)
        at += sum(p.elements for p in profile.root.parameters[done:before] if p.trainable)
        done = before
        for n, unit in enumerate(stack.units):
            gradients[UnitId(s, n)] = measure(unit.parameters, 0)
        begins = []
        for unit in stack.layers():
            begins.append(at)
            at += unit.trainable_elements
        starts.append(tuple(begins))
    gradients[AT_ROOT] = root + measure(profile.root.parameters[done:], at)
    return gradients, tuple(starts)


class DeepspeedStep(StepHooks):
    """DeepSpeed's hooks. `deepspeed.initialize` creates the fp32 master weights; the optimizer's first step creates its moments.

    `idle_stacks`: stacks whose layers do not run, such as a vision tower in a step on text.
    """

    gradient_hooks = True

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        settings: Settings | None = None,
        *,
        idle_stacks: frozenset[int] = frozenset(),
    ) -> None:
        self._profile, self._plan = profile, plan
        self._stage = stage(plan)
        self._settings = settings or settings_of(profile, plan)
        self._layout = _layout_of(profile, plan.without_step, self._settings)
        self.states = self._layout.states
        self._bucket = Bucket(self._layout.buffers, plan.shard_degree)
        self._idle_stacks = idle_stacks
        self._gathering = Gathering(Gathered((), ()))
        # State within one micro-batch
        self._is_first = self._is_last = True
        self._in_backward = False
        self._layers_left: list[int] = []  # by stack: real layers whose backward has not begun
        # State within one step
        self._persistent = NO_BUFFER
        self._unreduced: dict[int, BufferId] = {}  # stage 1: whole gradients by their position in the flat buffer
        self._averaged = NO_BUFFER
        self._moments: list[BufferId] = []  # by flat partition
        self._scored_after: Gathering | None = None  # the parameters gathered around a forward without gradients

    # The step

    def first_step_transients(self) -> Storages:
        """Stage 3 gathers each parameter once to register its hook, and frees it.

        Source: zero/stage3.py, create_reduce_and_remove_grad_hooks; partition_parameters.py, _allgather_params_sequential.
        """
        ranks = self._plan.shard_degree
        if self._stage < 3 or (ranks == 1 and not offloads_parameters(self._plan)):
            return NO_STORAGES
        whole = (
            Storages.of(self._plan.compute_bytes * ranks * shard_elements(p.elements, ranks))
            for p in self._profile.in_order()
            if p.trainable
        )
        return sum(whole, NO_STORAGES)

    def begin_step(self, step: StepBuilder) -> None:
        if self._stage == 3:
            self._gathering = Gathering(gathered(self._profile, self._plan, self._settings, idle=self._idle_stacks))
        step.alloc(Account.PARAMETERS, self._layout.parameters)
        self._persistent = step.alloc(Account.PARAMETERS, self._layout.buffers.released_at_step, Stream.ALL_GATHER)
        step.alloc(Account.OPTIMIZER, self._layout.optimizer.masters)
        step.alloc(Account.COMMUNICATION, self.states.communication)
        step.alloc(Account.GRADIENTS, self.states.gradients)
        step.alloc(Account.OTHER, self.states.buffers)
        self._moments = [
            step.alloc_in_first_step(Account.OPTIMIZER, part) for part in self._layout.optimizer.moments_by_partition
        ]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first, self._is_last = is_first, is_last
        self._bucket.begin(is_last=is_last)
        self._layers_left = [len(starts) for starts in self._layout.starts]
        self._gathering.begin_forward()
        self._in_backward = False

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        """Under ZeRO-3, give a forward without gradients its own coordinator, which starts with nothing gathered."""
        if self._stage == 3 and not with_gradients:
            self._scored_after = self._gathering
            self._gathering = Gathering(
                gathered(self._profile, self._plan, self._settings, forward_only=True, idle=self._idle_stacks)
            )
            self._gathering.begin_forward()

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        self._gathering.enter(step, unit)
        self._run_hooks(step)
        self._fetch(step, unit)

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        self._gathering.leave(step, unit)
        self._fetch(step, AT_ROOT)
        if unit == AT_ROOT and self._scored_after is not None:
            self._gathering.drop(step)
            self._gathering, self._scored_after = self._scored_after, None

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._gathering.begin_backward()
        if unit != AT_ROOT:  # the root's hook runs before the loss's backward, the head's after it
            self._layers_left[unit.stack] -= 1
            self._gathering.enter(step, unit)
        self._run_hooks(step)
        self._fetch(step, unit)

    def layer_done(self, step: StepBuilder, unit: UnitId) -> None:
        self._send_gradients(step, unit)

    def gradient_ready(self, step: StepBuilder, unit: UnitId, parameter: int, gradient: BufferId) -> None:
        part = self._layout.gradients[unit][parameter]
        self._gathering.enter_head(step)
        self._fetch(step, AT_ROOT)
        self._bucket.setup(step)
        if self._stage > 1:
            self._bucket.take(step, self._start(unit) + part.start, part, gradient)
        elif self._is_first:
            self._unreduced[self._start(unit) + part.start] = gradient
        else:
            step.free(gradient)

    def end_backward(self, step: StepBuilder) -> None:
        self._gathering.end(step)
        self._fetch(step, AT_ROOT)
        self._send_gradients(step, AT_ROOT)
        bucket = self._bucket
        if self._stage == 1:
            if not self._is_last:
                return
            self._reduce_whole_gradients(step)
        else:
            bucket.reduce(step)
        self._send_bulk(step)
        bucket.release(step)
        step.free(*step.whole_gradients())
        if bucket.averaged != NO_BUFFER:
            if not self._is_first and self._stage > 1:  # they were added to the first micro-batch's gradients
                step.free(bucket.averaged)
            else:
                self._averaged = bucket.averaged
        self._gathering.drop(step)

    def _reduce_whole_gradients(self, step: StepBuilder) -> None:
        """Stage 1, after the last backward: reduce the whole gradients through the bucket, in the order of the parameters.

        A parameter without a gradient is left out. Source: stage_1_and_2.py, reduce_gradients.
        """
        at = 0
        for parameter in self._profile.in_order():
            if not parameter.trainable:
                continue
            buffer = self._unreduced.pop(at, NO_BUFFER)
            oversized = parameter.elements > self._layout.buffers.bucket_elements
            if buffer != NO_BUFFER:
                self._bucket.take(step, at, Gradient(0, parameter.elements, 0, step.n_bytes(buffer), oversized), buffer)
            at += parameter.elements
        self._bucket.reduce(step)

    def optimizer_step(self, step: StepBuilder) -> None:
        """Allocate and free the storages of each moment of the optimizer step."""
        step.free(self._persistent)
        created = iter(self._moments)
        for moment in self._layout.buffers.moments:
            if not moment.gradients.exact:
                self._free_averaged(step)
            stepped = step.alloc(Account.TEMPORARIES, moment.stepped)
            if moment.name == "update" and (buffer := next(created, NO_BUFFER)) != NO_BUFFER:
                step.add(CreateStates(buffer))
            step.transient(Account.TEMPORARIES, moment.temporaries)
            step.free(stepped)
        self._free_averaged(step)
        step.alloc(Account.PARAMETERS, self._layout.buffers.released_at_step, Stream.ALL_GATHER)
        self._update(step)

    def _free_averaged(self, step: StepBuilder) -> None:
        step.free(self._averaged)
        self._averaged = NO_BUFFER

    def _start(self, unit: UnitId) -> int:
        return 0 if unit == AT_ROOT else self._layout.starts[unit.stack][self._layers_left[unit.stack]]

    # Time

    def _run_hooks(self, step: StepBuilder) -> None:
        if self._stage == 3:
            step.add(PythonHooks())

    def _fetch(self, step: StepBuilder, unit: UnitId) -> None:
        """Stage 3: add one all-gather for all those that began since the last call. Compute waits for it. Also add the copies of shards
        into its buffer and of parameters out of it, and the upload of the shards if they are offloaded.

        No compute hides an all-gather: published runs take as long as compute and communication together (11 runs, ten of them
        within 16 %, `validation/published.csv`). The prefetch is about one parameter with the settings of the Hugging Face integration
        (`stage3_prefetch_bucket_size` of 0.9 hidden^2), and it begins only after the previous hook.
        """
        n_bytes = self._gathering.take_bytes()
        if not n_bytes:
            return
        plan, n = self._plan, self._plan.shard_degree
        if plan.offload == "parameters":
            step.add(HostTransfer(unit, n_bytes / n, "parameters"))
        step.add(AllGather(unit, n_bytes, "after compute"))
        step.add(WaitFor(unit))
        step.add(Copy(unit, 2 * n_bytes / n + (2 * n_bytes if n > 1 else 0)))

    def _send_gradients(self, step: StepBuilder, unit: UnitId) -> None:
        """Add the copy of a unit's gradients into the bucket. Stage 3 reduces them during the backward of the next units."""
        plan, trainable = self._plan, unit_of(self._profile, unit).trainable_elements
        reduced, n = trainable * plan.compute_bytes, plan.shard_degree
        if self._stage < 3:
            step.add(Copy(unit, 4 * reduced))
            return
        if n > 1:
            step.add(Copy(unit, 3 * reduced))
        step.add(ReduceScatter(unit, reduced))
        if plan.offload != "none":
            step.add(HostTransfer(unit, reduced / n, "gradients"))

    def _send_bulk(self, step: StepBuilder) -> None:
        """Add the reduction of stages 1 and 2. It runs after backward, because `overlap_comm` is off, and all-reduces each bucket
        (`use_multi_rank_bucket_allreduce`).
        """
        plan, trainable = self._plan, self._profile.trainable_parameters
        if self._stage == 3:
            return
        n_bytes = trainable * plan.compute_bytes
        messages = -(-trainable // self._layout.buffers.bucket_elements)
        step.add(AllReduce(AT_ROOT, n_bytes, "shard", messages=messages, exposed=True))
        if plan.offload == "optimizer":
            step.add(HostTransfer(AT_ROOT, n_bytes / plan.shard_degree, "gradients", exposed=True))

    def _update(self, step: StepBuilder) -> None:
        plan, trainable = self._plan, self._profile.trainable_parameters
        own = trainable / plan.shard_degree
        if plan.offload == "none":
            step.add(gpu_step(self._profile, plan, own, masters=plan.mixed))
        else:
            step.add(host_step(plan, own))
        if plan.offload == "optimizer":
            step.add(HostTransfer(AT_ROOT, own * plan.compute_bytes, "parameters", exposed=True))
        if self._stage < 3:
            step.add(AllGather(AT_ROOT, trainable * plan.compute_bytes, "after compute"))
