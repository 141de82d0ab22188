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
from fsdp_advisor.engines.deepspeed.groups import ROOT, Group, groups
from fsdp_advisor.engines.deepspeed.muon_offload import OffloadedUpdates
from fsdp_advisor.engines.deepspeed.muon_updates import Exchanged, MuonUpdates, exchanged
from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import Settings, offloads_parameters, settings_of, stage
from fsdp_advisor.engines.optimizer_work import gpu_step, host_step
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, unit_of
from fsdp_advisor.model.profile import Profile
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
    OptimizerStep,
    PythonHooks,
    ReduceScatter,
    WaitFor,
)
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages, round_up


class Gradient(NamedTuple):
    """A parameter's gradient."""

    elements: int
    padded: int  # elements, padded to a multiple of the number of ranks
    n_bytes: int
    oversized: bool  # larger than the bucket: it is reduced in place
    owned: int  # elements of the flat buffer of its group that each rank owns, in stages 1 and 2


class Position(NamedTuple):
    """The position of a gradient: its group, and its start in the group's flat buffer."""

    group: int
    start: int


@dataclass(frozen=True, eq=False)
class _Layout:
    """The states of a plan and the positions of its gradients in the flat buffer. Independent of B, T and the tape."""

    states: States
    optimizer: partitions.OptimizerStates
    parameters: Storages  # the states' parameters, without those freed during the optimizer step
    buffers: Buffers
    bucket: Storages  # the states' communication, without the buffers of Muon's all-gathers
    groups: tuple[Group, ...]
    gradients: dict[tuple[UnitId, int], Gradient]  # by unit, and number of the parameter in it
    positions: dict[tuple[int, int, int], Position]  # by stack (or ROOT), real layer, and number of the parameter in it


@lru_cache(maxsize=64)
def _layout_of(profile: Profile, plan: Plan, settings: Settings) -> _Layout:
    buffers = step_buffers.buffers(profile, plan, settings)
    in_groups = groups(profile, plan)
    states = partitions.states(profile, plan, settings)
    return _Layout(
        states=states,
        optimizer=partitions.optimizer_states(profile, plan, settings),
        parameters=partitions.shards(profile, plan) if buffers.sharded else states.parameters,
        buffers=buffers,
        bucket=partitions.communication(profile, plan, settings),
        groups=in_groups,
        gradients=_gradients(profile, plan, in_groups, buffers),
        positions=_positions(in_groups),
    )


def _gradients(
    profile: Profile, plan: Plan, in_groups: tuple[Group, ...], buffers: Buffers
) -> dict[tuple[UnitId, int], Gradient]:
    """The gradient of each trained parameter of the recorded model."""
    ranks, found = plan.shard_degree, {}
    for group, owned in zip(in_groups, buffers.partition_elements or (0,) * len(in_groups), strict=True):
        for parameter, stack, layer, number in group.placed:
            unit = AT_ROOT if stack == ROOT else UnitId(stack, profile.stacks[stack].recorded_order[layer])
            if (unit, number) not in found:
                found[unit, number] = Gradient(
                    elements=parameter.elements,
                    padded=ranks * shard_elements(parameter.elements, ranks),
                    n_bytes=round_up(buffers.gradient_bytes * parameter.elements),
                    oversized=parameter.elements > buffers.bucket_elements,
                    owned=owned,
                )
    return found


def _positions(in_groups: tuple[Group, ...]) -> dict[tuple[int, int, int], Position]:
    """The position of the gradient of each real parameter."""
    found = {}
    for number, group in enumerate(in_groups):
        at = 0
        for placed in group.placed:
            found[placed.stack, placed.layer, placed.number] = Position(number, at)
            at += placed.parameter.elements
    return found


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
        self._muon: MuonUpdates | OffloadedUpdates  # in the optimizer step: of stage 3, or with offload
        if (offloaded := self._layout.buffers.offloaded_updates) is not None:
            self._muon = OffloadedUpdates(offloaded)
        else:
            self._muon = MuonUpdates(self._layout.buffers.chunks, plan.shard_degree, plan.compute_bytes)
        self._idle_stacks = idle_stacks
        self._gathering = Gathering(Gathered((), ()))
        # State within one micro-batch
        self._is_first = self._is_last = True
        self._in_backward = False
        self._layers_left: list[int] = []  # by stack: real layers whose backward has not begun
        # State within one step
        self._persistent = NO_BUFFER
        self._unreduced: dict[Position, tuple[Gradient, BufferId]] = {}  # stage 1: whole gradients
        self._averaged = NO_BUFFER
        self._momentum = NO_BUFFER  # of Muon
        self._updates: list[BufferId] = []  # of Muon
        self._moments: list[BufferId] = []  # by flat partition
        self._generates = False  # without the modules' hooks
        self._whole_model = NO_BUFFER  # all parameters, gathered for a generation
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
        step.alloc(Account.COMMUNICATION, self._layout.bucket)
        self._muon.begin_step(step)
        step.alloc(Account.GRADIENTS, self.states.gradients)
        step.alloc(Account.OTHER, self.states.buffers)
        self._momentum = step.alloc_in_first_step(Account.OPTIMIZER, self._layout.optimizer.momentum)
        self._moments = [
            step.alloc_in_first_step(Account.OPTIMIZER, part) for part in self._layout.optimizer.moments_by_partition
        ]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first, self._is_last = is_first, is_last
        self._bucket.begin(is_last=is_last)
        self._layers_left = [stack.depth for stack in self._profile.stacks]
        self._gathering.begin_forward()
        self._in_backward = False

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        """Under ZeRO-3, give a forward without gradients its own coordinator, which starts with nothing gathered but what no hook frees."""
        if self._stage == 3 and not with_gradients and not self._generates:
            self._scored_after, idle = self._gathering, self._idle_stacks
            holds_head = self._gathering.holds_parameters
            self._gathering = Gathering(
                gathered(self._profile, self._plan, self._settings, forward_only=True, holds_head=holds_head, idle=idle)
            )
            self._gathering.begin_forward()

    def begin_generation(self, step: StepBuilder) -> None:
        """Under ZeRO-3, gather all parameters, and remove the modules' hooks.

        Source: trl 1.16, models/utils.py, _unwrap_model_for_generation; zero/partition_parameters.py, GatheredParameters and
        _allgather_params_coalesced, which copies all shards from the host first if there are several ranks.
        """
        if self._stage < 3:
            return
        self._generates, plan = True, self._plan
        copied = NO_BUFFER
        if offloads_parameters(plan) and plan.shard_degree > 1:
            shards = partitions.not_persistent(self._profile, plan, self._settings, shards=1)
            copied = step.alloc(Account.TEMPORARIES, shards)
        whole = partitions.not_persistent(self._profile, plan, self._settings)
        self._whole_model = step.alloc(Account.UNSHARDED_PARAMETERS, whole)
        step.free(copied)

    def end_generation(self, step: StepBuilder) -> None:
        self._generates = False
        step.free(self._whole_model)

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        if self._generates:
            return
        self._gathering.enter(step, unit)
        self._run_hooks(step)
        self._fetch(step, unit)

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        if self._generates:
            return
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
        self._gathering.enter_head(step)
        self._fetch(step, AT_ROOT)
        self._bucket.setup(step)
        facts, position = self._layout.gradients[unit, parameter], self._position(unit, parameter)
        if self._stage > 1:
            self._bucket.take(step, position.start, facts, gradient)
        elif self._is_first:
            self._unreduced[position] = facts, gradient
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
        self._orthogonalize(step)
        bucket.release(step)
        step.free(*step.whole_gradients())
        if bucket.averaged != NO_BUFFER:
            if not self._is_first and self._stage > 1:  # they were added to the first micro-batch's gradients
                step.free(bucket.averaged)
            else:
                self._averaged = bucket.averaged
        if self._is_last and all(group.by_muon for group in self._layout.groups):
            self._free_averaged(step)  # the updates replace all gradients
        self._gathering.drop(step)

    def _reduce_whole_gradients(self, step: StepBuilder) -> None:
        """Stage 1, after the last backward: reduce the whole gradients through the bucket, in the order of the parameters.

        A parameter without a gradient is left out. Source: stage_1_and_2.py, reduce_gradients.
        """
        for position, (gradient, buffer) in sorted(self._unreduced.items()):
            self._bucket.take(step, position.start, gradient, buffer)
        self._unreduced.clear()
        self._bucket.reduce(step)

    def _orthogonalize(self, step: StepBuilder) -> None:
        """Make Muon's updates, one after the other, and in the first step its momentum before."""
        if self._momentum == NO_BUFFER or not self._is_last:
            return
        step.add(CreateStates(self._momentum))
        for update in self._layout.buffers.updates:
            step.transient(Account.TEMPORARIES, update.temporaries)
            self._updates.append(step.alloc(Account.GRADIENTS, update.update))

    def optimizer_step(self, step: StepBuilder) -> None:
        """Allocate and free the storages of each moment of the optimizer step."""
        step.free(self._persistent)
        self._muon.update(step)
        created = iter(self._moments)
        for moment in self._layout.buffers.moments:
            if moment.gradients.exact <= self._layout.buffers.averaged.exact:
                self._free_updates(step)
            if not moment.gradients.exact:
                self._free_averaged(step)
            stepped = step.alloc(Account.TEMPORARIES, moment.stepped)
            if moment.name == "update" and (buffer := next(created, NO_BUFFER)) != NO_BUFFER:
                step.add(CreateStates(buffer))
            step.transient(Account.TEMPORARIES, moment.temporaries)
            step.free(stepped)
        self._free_updates(step)
        self._free_averaged(step)
        step.alloc(Account.PARAMETERS, self._layout.buffers.released_at_step, Stream.ALL_GATHER)
        self._update(step)

    def _free_updates(self, step: StepBuilder) -> None:
        step.free(*self._updates)
        self._updates = []

    def _free_averaged(self, step: StepBuilder) -> None:
        step.free(self._averaged)
        self._averaged = NO_BUFFER

    def _position(self, unit: UnitId, parameter: int) -> Position:
        if unit == AT_ROOT:
            return self._layout.positions[ROOT, 0, parameter]
        return self._layout.positions[unit.stack, self._layers_left[unit.stack], parameter]

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
        if self._layout.buffers.all_reduces:
            step.add(AllReduce(unit, reduced, "shard"))
        else:
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
            work = gpu_step(self._profile, plan, own, masters=plan.mixed)
            flops = sum(update.flops for update in self._layout.buffers.updates)
            muon = exchanged(self._layout.buffers.chunks, plan.shard_degree, plan.compute_bytes)
            step.add(_with_updates(work._replace(flops=flops), muon))
        elif (updates := self._layout.buffers.offloaded_updates) is not None:
            step.add(HostTransfer(AT_ROOT, updates.host_transfer_bytes, "states", exposed=True))
            step.add(_with_updates(host_step(plan, own), updates.exchanged))
        else:
            step.add(host_step(plan, own))
        if plan.offload == "optimizer":
            step.add(HostTransfer(AT_ROOT, own * plan.compute_bytes, "parameters", exposed=True))
        if self._stage < 3:
            step.add(AllGather(AT_ROOT, trainable * plan.compute_bytes, "after compute"))


def _with_updates(work: OptimizerStep, muon: Exchanged) -> OptimizerStep:
    """The optimizer's step with the updates of Muon that it makes on the GPU."""
    return work._replace(
        n_bytes=work.n_bytes + muon.copied_bytes,
        flops=work.flops + muon.flops,
        gathered_bytes=muon.gathered_bytes,
        gathers=muon.gathers,
    )
