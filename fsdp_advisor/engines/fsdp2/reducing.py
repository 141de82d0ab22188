"""Reduces the gradients of FSDP2's units, and frees them.

Source: torch.distributed.fsdp._fully_shard (torch 2.13): `FSDPParamGroup.post_backward`, `foreach_reduce`, `finalize_backward`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from fsdp_advisor.engines.fsdp2.gathering import Gathering
from fsdp_advisor.engines.fsdp2.loss_in_chunks import LossInChunks
from fsdp_advisor.engines.fsdp2.units import UnitBytes, managed_order
from fsdp_advisor.engines.wrapping import HEAD, Part, Wrapping
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, unit_of
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.accounts import Account, Stream
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import OrderInUnit
from fsdp_advisor.program.instructions import (
    ADDED_TENSORS,
    NO_BUFFER,
    AllReduce,
    BufferId,
    Copy,
    HostTransfer,
    ReduceScatter,
)

OwnedGradient = tuple[OrderInUnit, BufferId]


class Reducing:
    """The gradients of each unit in one step that are not reduced yet, and the buffers of reductions that have not ended."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        wrapping: Wrapping,
        units: Mapping[UnitId, UnitBytes],
        gathering: Gathering,
        chunked_loss: LossInChunks | None,
    ) -> None:
        self._profile, self._plan = profile, plan
        self._wrapping, self._units = wrapping, units
        self._gathering = gathering
        self._chunked_loss = chunked_loss
        self._one_shard = plan.shard_degree == 1
        # State within one micro-batch
        self._is_first = self._reduces = True
        self._head_gradient = NO_BUFFER  # of a loss in chunks
        # State within one step
        self._previous_input = NO_BUFFER  # the last reduce-scatter's input lives until the next one's
        self._deferred: defaultdict[UnitId, deque[list[BufferId]]] = defaultdict(deque)
        self._all_reduced: list[tuple[UnitId, BufferId]] = []
        self._later: defaultdict[UnitId, list[OwnedGradient]] = defaultdict(list)
        """Gradients of units that the model's code has gathered, in layers after the first one whose backward has ended."""

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first = is_first
        self._reduces = is_last or not self._plan.defers_reduction
        self._head_gradient = NO_BUFFER

    def end_backward_of(self, step: StepBuilder, unit: UnitId) -> None:
        """Reduce and free the unit's gradients. While the reduction is deferred they stay, and autograd adds to them."""
        if self._wrapping.units is not None:
            owned = self._owned_gradients(step, unit)
            gradients, last = [gradient for _, gradient in owned], max(owned)[1] if owned else NO_BUFFER
        else:
            gradients, last = self._take_gradients(step, unit), self._last_gradient(step, unit)
        if self._plan.defers_reduction:
            if self._is_first:
                self._deferred[unit].append(gradients)
            else:
                step.add(Copy(unit, ADDED_TENSORS * self._units[unit].trainable_elements * self._plan.compute_bytes))
            if not self._reduces:
                return
            gradients = self._deferred[unit].popleft()
        sizes = self._chunked_loss.rest if self._chunked_loss is not None and unit == HEAD else self._units[unit]
        self._reduce(step, unit, gradients, last, sizes)

    def reduce_head(self, step: StepBuilder, gradient: BufferId, sizes: UnitBytes) -> None:
        """Reduce the head's gradient after the last chunk of a loss in chunks."""
        self._head_gradient = gradient
        self._reduce(step, HEAD, [gradient], gradient, sizes)

    def keep_shard(self, step: StepBuilder, gradient: BufferId) -> None:
        """Keep a shard of the gradient of the head's weight, which the backward of `DTensor.full_tensor` makes. Nothing reduces it."""
        sizes = self._units[HEAD].gradients
        shard = step.alloc(Account.GRADIENTS, sizes)
        step.free(gradient)
        if not self._is_first:  # autograd adds it to that of an earlier micro-batch
            step.add(Copy(HEAD, ADDED_TENSORS * sizes.exact))
            step.free(shard)

    def free_added(self, step: StepBuilder, gradients: list[BufferId]) -> None:
        """Free new gradients that autograd has added to those of an earlier micro-batch, whose reduction is deferred."""
        if not self._is_first and self._plan.defers_reduction:
            step.free(*gradients)

    def end_backward(self, step: StepBuilder) -> None:
        """Free what the last reductions have kept."""
        step.free(self._previous_input)
        self._previous_input = NO_BUFFER
        step.free(*(buffer for _, buffer in self._all_reduced))
        self._all_reduced = []

    # The reduction

    def _reduce(
        self, step: StepBuilder, unit: UnitId, gradients: list[BufferId], last: BufferId, sizes: UnitBytes
    ) -> None:
        """Copy gradients in, reduce-scatter them, and all-reduce them over the replicas (`foreach_reduce`).

        If there is more than one rank, a loop variable keeps the gradient of the unit's `last` parameter alive until the reduction ends.
        """
        keeps_last = not self._one_shard and last in gradients  # else it was added to that of an earlier micro-batch
        step.free(self._previous_input)
        self._previous_input = NO_BUFFER
        if not sizes.trainable_elements:
            return
        if unit == HEAD:  # a second reduction in one backward waits for the first
            step.free(*(buffer for of, buffer in self._all_reduced if of == HEAD))
            self._all_reduced = [(of, buffer) for of, buffer in self._all_reduced if of != HEAD]
        self._previous_input = step.alloc(Account.COMMUNICATION, sizes.reduce_input)
        step.free(*(gradient for gradient in gradients if not (keeps_last and gradient == last)))
        reduced = step.alloc(Account.COMMUNICATION, sizes.reduce_output, Stream.REDUCE_SCATTER)
        casts = reduced != NO_BUFFER
        cast_on = Stream.ALL_REDUCE if casts and self._plan.has_replica_mesh else Stream.REDUCE_SCATTER
        output = step.alloc(Account.GRADIENTS, sizes.gradients, cast_on)
        if self._one_shard and self._plan.facts.sums_gradients:  # `reduce_scatter_input / gradient_divide_factor`
            step.transient(Account.COMMUNICATION, sizes.reduce_input, Stream.REDUCE_SCATTER)
        self._send(step, unit, sizes)
        if self._plan.has_replica_mesh:
            self._all_reduced.append((unit, reduced))  # `FSDPParamGroup._all_reduce_state`
        else:
            step.free(reduced)
        if keeps_last:
            step.free(last)
        self._keep(step, unit, output, sizes, is_all_reduced=self._plan.has_replica_mesh and not casts)

    def _send(self, step: StepBuilder, unit: UnitId, sizes: UnitBytes) -> None:
        """The copies and collectives of a reduction."""
        plan, n = self._plan, self._plan.shard_degree
        reduced = sizes.reduced_bytes
        if n > 1:
            step.add(Copy(unit, sizes.trainable_elements * plan.compute_bytes + 2 * reduced))
        step.add(ReduceScatter(unit, reduced))
        if plan.replica_degree > 1:
            step.add(AllReduce(unit, reduced / n, "replica"))
        if plan.offload == "parameters":
            step.add(HostTransfer(unit, sizes.gradients.exact, "gradients"))

    def _keep(
        self, step: StepBuilder, unit: UnitId, output: BufferId, sizes: UnitBytes, *, is_all_reduced: bool
    ) -> None:
        """Keep the output of a reduction as the gradient, move it to the host, or add it to that of an earlier micro-batch.

        `is_all_reduced`: the output itself is all-reduced over the replicas, so it lives until the end of backward.
        """
        if self._plan.offload == "parameters":
            step.free(output)
        elif self._plan.captures_graph or not (self._is_first or self._plan.defers_reduction):
            step.add(Copy(unit, ADDED_TENSORS * sizes.gradients.exact))
            if is_all_reduced:
                step.reclassify(Account.COMMUNICATION, output)
                self._all_reduced.append((unit, output))
            else:
                step.free(output)

    # The gradients of a unit

    def _owned_gradients(self, step: StepBuilder, unit: UnitId) -> list[OwnedGradient]:
        """The gradients of a unit of a wrap policy; of one that the model's code has gathered in several layers, those in the first layer
        that is left.
        """
        owned = self._later.pop(unit, []) + step.take_owned_gradients(unit)
        if unit not in self._gathering.by_code or not owned:
            return owned
        number = min(order[1] for order, _ in owned)
        self._later[unit] = [gradient for gradient in owned if gradient[0][1] != number]
        return [gradient for gradient in owned if gradient[0][1] == number]

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
