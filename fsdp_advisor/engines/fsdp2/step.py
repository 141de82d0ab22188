"""A step of PyTorch FSDP2: `fully_shard` on each layer and on the root, on the parts into which a framework divides the
root (`wrapping`), or on the units of a wrap policy (`policy_walk`).

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParamGroup.unshard`, `wait_for_unshard`, `post_backward`,
`foreach_all_gather`, `foreach_reduce`, `FSDPState._post_forward`.
Inputs and outputs of all-gathers are allocated on the copy-in stream, outputs of reduce-scatters on the reduce-scatter stream,
everything else on the compute stream. Streams wait for one another through events, so no free is delayed (no `record_stream`).
"""

from __future__ import annotations

from collections import defaultdict, deque

from fsdp_advisor.engines.forward_order import ForwardOrder
from fsdp_advisor.engines.fsdp2.gathering import Gathering
from fsdp_advisor.engines.fsdp2.loss_in_chunks import loss_in_chunks
from fsdp_advisor.engines.fsdp2.units import UnitBytes, fsdp2_units, managed_order
from fsdp_advisor.engines.fsdp_shards import shard_shape
from fsdp_advisor.engines.optimizer_work import gpu_step, gradient_norms, host_step, optimizer_temporaries, shards_of
from fsdp_advisor.engines.policy_walk import OneUnitPerLayer, PolicyWalk
from fsdp_advisor.engines.wrapping import HEAD, Part, head_gathered_by_loss, marked_units
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, WHOLE, UnitId, unit_of
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import OrderInUnit, StepHooks
from fsdp_advisor.program.instructions import (
    ADDED_TENSORS,
    NO_BUFFER,
    AllReduce,
    BufferId,
    Copy,
    HostTransfer,
    PythonHooks,
    ReduceScatter,
)
from fsdp_advisor.program.storages import ALIGNMENT, Storages

OwnedGradient = tuple[OrderInUnit, BufferId]


class Fsdp2Step(StepHooks):
    """FSDP2's hooks around each unit. They hold the state of one program: make new ones for each program."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self.marked_units = marked_units(profile, plan)
        self._offload = plan.offload == "parameters"
        self._reshard = plan.reshards
        self._one_shard = plan.shard_degree == 1
        self._wrapping, self._units, self.states = fsdp2_units(profile, plan.without_step)
        policy = self._wrapping.units
        self._walk = PolicyWalk(profile, policy) if policy is not None else OneUnitPerLayer()
        self._chunked_loss = loss_in_chunks(profile, plan, self._wrapping)
        gathered = head_gathered_by_loss(profile, plan)
        self._head_of_loss = gathered if gathered is not None and profile.root.parameters[gathered].trainable else None
        self.gradient_hooks = plan.defers_reduction or self._chunked_loss is not None or self._head_of_loss is not None
        # State within one micro-batch
        self._is_first = self._reduces = True
        self._repeated = False  # a forward of this micro-batch has run before
        self._runs_head = False
        self._loss_ended, self._head_gradient = False, NO_BUFFER
        # State within one step
        self._forward_order = ForwardOrder()
        self._ran_in_layer: set[UnitId] = set()  # units within the current layer whose forward has run
        self._gathering = Gathering(plan, self._units)
        self._previous_reduce_input = NO_BUFFER  # the last reduce-scatter's input lives until the next one's
        self._unreduced: defaultdict[UnitId, deque[list[BufferId]]] = defaultdict(deque)  # reduction is deferred
        self._all_reduced: list[tuple[UnitId, BufferId]] = []
        self._by_code: list[UnitId] = []  # the units that the model's code has gathered, in the model's order
        self._later: defaultdict[UnitId, list[OwnedGradient]] = defaultdict(list)  # their gradients in further layers

    # The step

    def begin_step(self, step: StepBuilder) -> None:
        step.alloc(Account.PARAMETERS, self.states.parameters)
        if self._plan.captures_graph:
            step.alloc_in_first_step(Account.GRADIENTS, self.states.gradients)
        step.alloc_in_first_step(Account.OPTIMIZER, self.states.optimizer)
        step.alloc(Account.OTHER, self.states.buffers)

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first = is_first
        self._reduces = is_last or not self._plan.defers_reduction
        self._repeated = self._runs_head = False
        self._ran_in_layer.clear()
        self._loss_ended, self._head_gradient = False, NO_BUFFER
        self._forward_order.clear()
        self._walk.begin()

    def begin_forward(self, *, with_gradients: bool, repeated: bool) -> None:
        self._repeated = repeated

    def unsharded(self, unit: UnitId) -> Storages:
        """A unit's parameters when they are gathered."""
        return self._units[unit].unsharded

    def pre_forward(self, step: StepBuilder, unit: UnitId) -> None:
        unit = self._walk.pre_forward(unit)
        if self._is_empty(unit):
            return
        self._runs_head = self._runs_head or unit == HEAD
        step.add(PythonHooks())
        if unit.part == WHOLE:
            self._ran_in_layer.clear()
        has_run = self._repeated or unit in self._ran_in_layer
        self._ran_in_layer.add(unit)
        if has_run and not self._reshards(unit):
            return  # it is still gathered since its previous forward
        self._gathering.unshard(step, unit, "forward")
        if self._plan.forward_prefetch and unit != AT_ROOT and step.following is not None:
            self._gathering.request(step, step.following, "forward")

    def gather_by_code(self, step: StepBuilder, unit: UnitId) -> None:
        """Gather the unit (`FSDPModule.unshard`). Only the final callback frees it."""
        if self._is_empty(unit):
            return
        step.add(PythonHooks())
        self._gathering.unshard(step, unit, "code")
        self._by_code.append(unit)

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        unit = self._walk.post_forward(unit)
        if unit == AT_ROOT and self._runs_head:
            self._forward_order.record(HEAD)  # the tape has no mark for the end of its forward
        if not self._is_empty(unit):
            self._forward_order.record(unit)
            if self._reshards(unit):
                self._gathering.reshard_after_forward(step, unit)
        if unit == AT_ROOT:
            self._gathering.free_previous_output(step)

    def before_recomputation(self, step: StepBuilder, unit: UnitId) -> None:
        """Gather a unit within a layer. It stays gathered until its backward has run (`FSDPParamGroup.post_forward`)."""
        if self._is_empty(unit) or self._gathering.is_unsharded(unit):
            return
        step.add(PythonHooks())
        self._gathering.unshard(step, unit, "recomputation")

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        unit = self._walk.pre_backward(unit)
        if self._is_empty(unit) and unit != AT_ROOT:
            return
        step.add(PythonHooks())
        gathers = (self._reshards(unit) or (unit == HEAD and self._chunked_loss)) and not self._is_empty(unit)
        if gathers and not self._was_recomputed(unit):
            self._gathering.unshard(step, unit, "backward")
        target = self._forward_order.pop_target(unit)
        if target is None or self._gathering.is_requested(target) or self._was_recomputed(target):
            return
        if self._reshards(target):
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
        """Reduce and free the unit's gradients. While the reduction is deferred they stay, and autograd adds to them."""
        if self._is_empty(unit):
            return
        if self._gathering.is_unsharded(unit):  # a unit without a backward of its own was freed after forward
            self._gathering.free(step, unit)
        if self._wrapping.units is not None:
            owned = self._owned_gradients(step, unit)
            gradients, last = [gradient for _, gradient in owned], max(owned)[1] if owned else NO_BUFFER
        else:
            gradients, last = self._take_gradients(step, unit), self._last_gradient(step, unit)
        if self._plan.defers_reduction:
            if self._is_first:
                self._unreduced[unit].append(gradients)
            else:
                step.add(Copy(unit, ADDED_TENSORS * self._units[unit].trainable_elements * self._plan.compute_bytes))
            if not self._reduces:
                return
            gradients = self._unreduced[unit].popleft()
        sizes = self._chunked_loss.rest if self._chunked_loss is not None and unit == HEAD else self._units[unit]
        self._reduce(step, unit, gradients, last, sizes)

    def _owned_gradients(self, step: StepBuilder, unit: UnitId) -> list[OwnedGradient]:
        """The gradients of a unit; of one that the model's code has gathered in several layers, those in the first layer that is left."""
        owned = self._later.pop(unit, []) + step.take_owned_gradients(unit)
        if unit not in self._by_code or not owned:
            return owned
        number = min(order[1] for order, _ in owned)
        self._later[unit] = [gradient for gradient in owned if gradient[0][1] != number]
        return [gradient for gradient in owned if gradient[0][1] == number]

    def _reduce(
        self, step: StepBuilder, unit: UnitId, gradients: list[BufferId], last: BufferId, sizes: UnitBytes
    ) -> None:
        """Copy gradients in, reduce-scatter them, and all-reduce them over the replicas (`foreach_reduce`).

        If there is more than one rank, a loop variable keeps the gradient of the unit's `last` parameter alive until the reduction ends.
        """
        keeps_last = not self._one_shard and last in gradients  # else it was added to that of an earlier micro-batch
        step.free(self._previous_reduce_input)
        self._previous_reduce_input = NO_BUFFER
        if not sizes.trainable_elements:
            return
        if unit == HEAD:  # a second reduction in one backward waits for the first
            step.free(*(buffer for of, buffer in self._all_reduced if of == HEAD))
            self._all_reduced = [(of, buffer) for of, buffer in self._all_reduced if of != HEAD]
        self._previous_reduce_input = step.alloc(Account.COMMUNICATION, sizes.reduce_input)
        step.free(*(gradient for gradient in gradients if not (keeps_last and gradient == last)))
        reduced = step.alloc(Account.COMMUNICATION, sizes.reduce_output, Stream.REDUCE_SCATTER)
        casts = reduced != NO_BUFFER
        cast_on = Stream.ALL_REDUCE if casts and self._plan.has_replica_mesh else Stream.REDUCE_SCATTER
        output = step.alloc(Account.GRADIENTS, sizes.gradients, cast_on)
        if self._one_shard and self._plan.facts.sums_gradients:  # `reduce_scatter_input / gradient_divide_factor`
            step.transient(Account.COMMUNICATION, sizes.reduce_input, Stream.REDUCE_SCATTER)
        self._send_gradients(step, unit, sizes)
        if self._plan.has_replica_mesh:
            self._all_reduced.append((unit, reduced))  # `FSDPParamGroup._all_reduce_state`
        else:
            step.free(reduced)
        if keeps_last:
            step.free(last)
        if self._offload:
            step.free(output)
        elif self._plan.captures_graph or not (self._is_first or self._plan.defers_reduction):
            step.add(Copy(unit, ADDED_TENSORS * sizes.gradients.exact))
            if self._plan.has_replica_mesh and not casts:  # the output itself is all-reduced
                step.reclassify(Account.COMMUNICATION, output)
                self._all_reduced.append((unit, output))
            else:
                step.free(output)

    def gradient_ready(self, step: StepBuilder, unit: UnitId, parameter: int, gradient: BufferId) -> None:
        """After the last chunk of a loss in chunks, reduce the head's gradient; keep a shard of that of a head that the loss has gathered.
        Otherwise, free a gradient that autograd has added to that of an earlier micro-batch.
        """
        if self._chunked_loss is not None:
            if unit == AT_ROOT and parameter == self._chunked_loss.parameter and not self._loss_ended:
                self._end_loss(step, gradient)
            return
        fresh = step.take_new_gradients()
        if unit == AT_ROOT and parameter == self._head_of_loss:
            self._keep_shard(step, gradient)
        elif not self._is_first and self._plan.defers_reduction:
            step.free(*fresh)

    def _keep_shard(self, step: StepBuilder, gradient: BufferId) -> None:
        """Keep a shard of the gradient of the head's weight, which the backward of `DTensor.full_tensor` makes. Nothing reduces it."""
        shard = step.alloc(Account.GRADIENTS, self._units[HEAD].gradients)
        step.free(gradient)
        if not self._is_first:  # autograd adds it to that of an earlier micro-batch
            step.add(Copy(HEAD, ADDED_TENSORS * self._units[HEAD].gradients.exact))
            step.free(shard)

    def _end_loss(self, step: StepBuilder, gradient: BufferId) -> None:
        """Reduce the head's gradient after the last chunk, and free the unit's parameters, which backward gathers again."""
        assert self._chunked_loss is not None
        self._loss_ended = True
        self._head_gradient = gradient
        self._reduce(step, HEAD, [self._head_gradient], self._head_gradient, self._chunked_loss.head)
        self._gathering.free(step, HEAD)

    def end_backward(self, step: StepBuilder) -> None:
        """Reduce the remaining units. FSDP2 does so in a final callback of autograd, which still holds the loss's gradient."""
        gradient = step.alloc(Account.LOSS, Storages.of(ALIGNMENT))
        for unit in self._not_reduced():
            self._end_backward_of(step, unit)
        self._by_code.clear()
        self._gathering.free_outputs(step)
        self._gathering.free_previous_output(step)
        step.free(gradient)
        step.free(self._previous_reduce_input)
        self._previous_reduce_input = NO_BUFFER
        step.free(*(buffer for _, buffer in self._all_reduced))
        self._all_reduced = []

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
        others = {*first, *self._by_code}
        return [*first, *(unit for unit in self._gathering.unsharded() if unit not in others), *self._by_code]

    def _take_gradients(self, step: StepBuilder, unit: UnitId) -> list[BufferId]:
        """A unit's unsharded gradients. Used if no wrap policy divides the model."""
        parts = self._wrapping.parts
        part = parts.get(unit)
        if part is None or (HEAD not in parts and not self._wrapping.layers_in_root):
            return step.take_gradients(unit)
        if unit != AT_ROOT or not self._wrapping.layers_in_root:
            return self._gradients_of_part(step, part)
        if self._plan.defers_reduction and not self._is_first:
            return []
        # gradients that were already reduced are freed, unless reduction is deferred
        others = [p for p in parts if p != AT_ROOT and (self._plan.defers_reduction or p in self._wrapping.last)]
        theirs = {gradient for other in others for gradient in self._gradients_of_part(step, parts[other])}
        return [gradient for gradient in step.whole_gradients() if gradient not in theirs]

    def _gradients_of_part(self, step: StepBuilder, part: Part) -> list[BufferId]:
        trainable = (i for i, parameter in zip(part.indices, part.unit.parameters, strict=False) if parameter.trainable)
        found = (step.gradient(i, at_root=True) for i in trainable)
        return [gradient for gradient in found if gradient not in (NO_BUFFER, self._head_gradient)]

    def _last_gradient(self, step: StepBuilder, unit: UnitId) -> BufferId:
        """The gradient of the unit's last parameter that has one; NO_BUFFER if none has."""
        part = self._wrapping.parts.get(unit)
        parameters = (part.unit if part is not None else unit_of(self._profile, unit)).parameters
        indices = part.indices if part is not None else range(len(parameters))
        trainable = [indices[at] for at in managed_order(parameters[: len(indices)]) if parameters[at].trainable]
        found = (step.gradient(index, at_root=unit.is_outside_layers) for index in reversed(trainable))
        return next((gradient for gradient in found if gradient not in (NO_BUFFER, self._head_gradient)), NO_BUFFER)

    def _send_gradients(self, step: StepBuilder, unit: UnitId, sizes: UnitBytes) -> None:
        plan, n = self._plan, self._plan.shard_degree
        reduced = sizes.reduced_bytes
        if n > 1:
            step.add(Copy(unit, sizes.trainable_elements * plan.compute_bytes + 2 * reduced))
        step.add(ReduceScatter(unit, reduced))
        if plan.replica_degree > 1:
            step.add(AllReduce(unit, reduced / n, "replica"))
        if self._offload:
            step.add(HostTransfer(unit, sizes.gradients.exact, "gradients"))
