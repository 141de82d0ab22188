"""A step of PyTorch FSDP2: `fully_shard` on each layer and on the root, on the parts into which a framework divides the
root (`wrapping`), or on the units of a wrap policy (`policy_walk`). `gathering` and `reducing` have the parameters and gradients of units.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParamGroup`, `FSDPState._post_forward`.
Inputs and outputs of all-gathers are allocated on the copy-in stream, outputs of reduce-scatters on the reduce-scatter stream,
everything else on the compute stream. Streams wait for one another through events, so no free is delayed (no `record_stream`).
"""

from __future__ import annotations

from fsdp_advisor.engines.forward_order import ForwardOrder
from fsdp_advisor.engines.fsdp2.gathering import Gathering
from fsdp_advisor.engines.fsdp2.loss_in_chunks import loss_in_chunks
from fsdp_advisor.engines.fsdp2.reducing import Reducing
from fsdp_advisor.engines.fsdp2.units import fsdp2_units
from fsdp_advisor.engines.fsdp_shards import shard_shape
from fsdp_advisor.engines.optimizer_work import gpu_step, gradient_norms, host_step, optimizer_temporaries, shards_of
from fsdp_advisor.engines.policy_walk import OneUnitPerLayer, PolicyWalk
from fsdp_advisor.engines.wrapping import HEAD, head_gathered_by_loss, head_is_alone, marked_units
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, WHOLE, UnitId
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import OrderInUnit, StepHooks
from fsdp_advisor.program.instructions import (
    BufferId,
    PythonHooks,
)
from fsdp_advisor.program.storages import ALIGNMENT, Storages


class Fsdp2Step(StepHooks):
    """FSDP2's hooks around each unit. They hold the state of one program: make new ones for each program."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self.marked_units = marked_units(profile, plan)
        self._offload = plan.offload == "parameters"
        self._reshard = plan.reshards
        self._wrapping, self._units, self.states = fsdp2_units(profile, plan.without_step)
        policy = self._wrapping.units
        self._walk = PolicyWalk(profile, policy) if policy is not None else OneUnitPerLayer()
        self._chunked_loss = loss_in_chunks(profile, plan, self._wrapping)
        gathered = head_gathered_by_loss(profile, plan)
        self._head_of_loss = gathered if gathered is not None and profile.root.parameters[gathered].trainable else None
        self._loss_gathers_head = gathered is not None
        self._tied = tuple(i for i, p in enumerate(profile.root.parameters) if p.tied)
        self._only_generation_calls_head = plan.generation is not None and head_is_alone(profile, plan)
        self.gradient_hooks = plan.defers_reduction or self._chunked_loss is not None or self._head_of_loss is not None
        self._gathering = Gathering(plan, self._units)
        self._reducing = Reducing(profile, plan, self._wrapping, self._units, self._gathering, self._chunked_loss)
        # State within one micro-batch
        self._repeated = False  # a forward of this micro-batch has run before
        self._with_gradients = True  # so has the forward that runs
        self._generation_gathered_head = False
        """Whether the last gathered unit is a head that only generation calls. PEFT's `generate` calls the model inside the root, so no
        hook of the root frees the output of the last all-gather.
        """
        self._runs_head = self._loss_ended = False
        self._forward_order = ForwardOrder()
        self._ran_in_layer: set[UnitId] = set()  # units within the current layer whose forward has run
        self._root_of_recomputation: UnitId | None = None
        self._in_backward: set[UnitId] = set()  # units within layers whose backward has begun and not ended

    # The step

    def begin_step(self, step: StepBuilder) -> None:
        step.alloc(Account.PARAMETERS, self.states.parameters)
        if self._plan.captures_graph:
            step.alloc_in_first_step(Account.GRADIENTS, self.states.gradients)
        step.alloc_in_first_step(Account.OPTIMIZER, self.states.optimizer)
        step.alloc(Account.OTHER, self.states.buffers)

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._repeated = self._runs_head = self._loss_ended = False
        self._ran_in_layer.clear()
        self._root_of_recomputation = None
        self._in_backward.clear()
        self._forward_order.clear()
        self._walk.begin()
        self._reducing.begin_micro_batch(is_first=is_first, is_last=is_last)

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        self._repeated, self._with_gradients = repeated, with_gradients

    def unsharded(self, unit: UnitId) -> Storages:
        """A unit's parameters when they are gathered."""
        return self._units[unit].unsharded

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        if unit.part == WHOLE:  # a layer begins, which need not be a unit
            self._ran_in_layer.clear()
        unit = self._walk.pre_forward(unit)
        if unit == AT_ROOT:
            self._runs_head = False
            if self._loss_gathers_head and self._with_gradients and self._gathering.is_unsharded(HEAD):
                self._gathering.free(step, HEAD)  # as in a micro-batch without a generation, which needs more
        if self._is_empty(unit):
            return
        self._runs_head = self._runs_head or unit == HEAD
        step.add(PythonHooks())
        has_run = self._repeated or unit in self._ran_in_layer
        self._ran_in_layer.add(unit)
        if has_run and not self._reshards(unit):
            return  # it is still gathered since its previous forward
        self._gathering.unshard(step, unit, "forward")
        self._generation_gathered_head = unit == HEAD and self._only_generation_calls_head
        if self._plan.forward_prefetch and unit != AT_ROOT and step.following is not None:
            self._gathering.request(step, step.following, "forward")

    def gather_by_code(self, step: StepBuilder, unit: UnitId) -> None:
        """Gather the unit (`FSDPModule.unshard`). Only the final callback frees it."""
        if self._is_empty(unit):
            return
        step.add(PythonHooks())
        self._gathering.unshard(step, unit, "code")

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        unit = self._walk.post_forward(unit)
        if unit == AT_ROOT and self._runs_head:
            self._forward_order.record(HEAD)  # the tape has no mark for the end of its forward
        if not self._is_empty(unit):
            self._forward_order.record(unit)
            if self._reshards(unit):
                self._gathering.reshard_after_forward(step, unit)
        if unit == AT_ROOT and not self._generation_gathered_head:
            self._gathering.free_previous_output(step)

    def before_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """Gather a unit within a layer. It stays gathered until its backward has run (`FSDPParamGroup.post_forward`).

        The first one is the root of a forward for FSDP2 (`iter_forward_root`). If checkpointing stops in it, it stays the root. A unit
        whose backward has begun, such as the last of a layer, is gathered already, and is no root (`FSDPState._pre_forward`).
        """
        if self._is_empty(unit) or unit in self._in_backward:
            return
        if self._root_of_recomputation is None:
            self._root_of_recomputation = unit
        if self._gathering.is_unsharded(unit):
            return
        step.add(PythonHooks())
        self._gathering.unshard(step, unit, "recomputation")

    def after_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """After the root's forward, free the output of the last all-gather (`FSDPState._post_forward`)."""
        if unit == self._root_of_recomputation:
            self._gathering.free_previous_output(step)
            self._root_of_recomputation = None

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        unit = self._walk.pre_backward(unit)
        if self._is_empty(unit) and unit != AT_ROOT:
            return
        step.add(PythonHooks())
        self._in_backward.add(unit)
        gathers = (self._reshards(unit) or (unit == HEAD and self._chunked_loss)) and not self._is_empty(unit)
        if gathers and not self._was_recomputed(unit):
            self._gathering.unshard(step, unit, "backward")
        target = self._forward_order.pop_target(unit)
        if target is None or self._gathering.is_requested(target) or self._was_recomputed(target):
            return
        # a unit of an earlier forward may be freed already
        if self._reshards(target) or not self._gathering.is_unsharded(target):
            self._gathering.request(step, target, "backward")

    def post_backward(self, step: StepBuilder, unit: UnitId) -> None:
        self._end_backward_of(step, self._walk.post_backward(unit))

    def layer_done(self, step: StepBuilder, unit: UnitId) -> None:
        self._walk.layer_done(unit)

    def owner_of(
        self, unit_id: UnitId, number: int, parameter: int, at_root: bool
    ) -> tuple[UnitId, OrderInUnit] | None:
        return self._walk.owner_of(unit_id, number, parameter, at_root)

    def _end_backward_of(self, step: StepBuilder, unit: UnitId) -> None:
        if self._is_empty(unit):
            return
        if self._gathering.is_unsharded(unit):  # a unit without a backward of its own was freed after forward
            self._gathering.free(step, unit)
        self._in_backward.discard(unit)
        self._reducing.end_backward_of(step, unit)

    def gradient_ready(self, step: StepBuilder, unit: UnitId, parameter: int, gradient: BufferId) -> None:
        """After the last chunk of a loss in chunks, reduce the head's gradient; keep a shard of that of a head that the loss has gathered.
        Otherwise, free a gradient that autograd has added to that of an earlier micro-batch.
        """
        if self._chunked_loss is not None:
            if unit == AT_ROOT and parameter == self._chunked_loss.parameter and not self._loss_ended:
                self._loss_ended = True
                self._reducing.reduce_head(step, gradient, self._chunked_loss.head)
                self._gathering.free(step, HEAD)  # backward gathers it again
            return
        # a tied weight's first gradient waits for its second one
        waiting = {step.gradient(i, at_root=True) for i in self._tied if (unit, parameter) != (AT_ROOT, i)}
        fresh = step.take_new_gradients(waiting)
        if unit == AT_ROOT and parameter == self._head_of_loss:
            self._reducing.keep_shard(step, gradient)
        else:
            self._reducing.free_added(step, fresh)

    def end_backward(self, step: StepBuilder) -> None:
        """Reduce the remaining units. FSDP2 does so in a final callback of autograd, which still holds the loss's gradient."""
        gradient = step.alloc(Account.LOSS, Storages.of(ALIGNMENT))
        for unit in self._not_reduced():
            self._end_backward_of(step, unit)
        self._gathering.end_backward(step)
        step.free(gradient)
        self._reducing.end_backward(step)

    def optimizer_step(self, step: StepBuilder) -> None:
        plan, profile = self._plan, self._profile
        own = profile.trainable_parameters / plan.shard_degree
        if self._offload:
            step.add(host_step(plan, own))
            return
        step.transient(Account.TEMPORARIES, gradient_norms(profile, plan))
        shards = plan.shard_degree
        temporaries = optimizer_temporaries(profile, plan, lambda p: shard_shape(p.shape, shards), shards_of(plan))
        step.transient(Account.TEMPORARIES, temporaries)
        step.add(gpu_step(self._profile, plan, own, shards_of(plan)))

    # Units

    def _is_empty(self, unit: UnitId) -> bool:
        """Whether the unit has no parameters: a root whose parameters are all in other units, or a layer that is not wrapped."""
        return unit not in self._units or not self._units[unit].shards

    def _reshards(self, unit: UnitId) -> bool:
        """Whether a unit's parameters are freed after forward and gathered again for backward."""
        part = self._wrapping.parts.get(unit)
        return self._reshard and not (part is not None and part.keeps)

    def _was_recomputed(self, unit: UnitId) -> bool:
        """Whether a unit within a layer is gathered because the layer has been recomputed."""
        return not (unit.is_layer or unit.is_outside_layers) and self._gathering.is_unsharded(unit)

    def _not_reduced(self) -> list[UnitId]:
        """The units whose post-backward hook has not run, in the order of `all_states`: the root, then the model's order.

        They are the root's units, layers whose inputs need no gradient, and units that the model's code has gathered.
        """
        first = (AT_ROOT,) if self._wrapping.units is not None else self._wrapping.last
        others = {*first, *self._gathering.by_code}
        return [*first, *(unit for unit in self._gathering.unsharded() if unit not in others), *self._gathering.by_code]
