"""A step of PyTorch DistributedDataParallel with its default settings, and a step on a single GPU.

Source: torch.nn.parallel.distributed and torch/csrc/distributed/c10d/reducer.cpp (torch 2.13). The first step has one bucket
per dtype. At the second forward the buckets are rebuilt: 1 MiB, then 25 MiB, in the order in which gradients became ready. If DDP searches
for unused parameters, they have these sizes from the start, over the parameters in reverse order.
`gradient_as_bucket_view=False` makes them a second copy of the gradients.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from fsdp_advisor.engines.model_outputs import (
    encoded_per_batch,
    logits_on,
    logits_per_batch,
    output_bytes,
    searches_unused,
)
from fsdp_advisor.engines.optimizer_state import kept_state
from fsdp_advisor.engines.optimizer_work import (
    gpu_step,
    gradient_norms,
    host_state_bytes,
    optimizer_loop,
    optimizer_temporaries,
)
from fsdp_advisor.engines.units import buffers, parameters_in_order, total
from fsdp_advisor.engines.wrapping import OUTPUTS, marked_units
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT, UnitId, unit_of
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.tape import ROOT, Op, Segment, Tape
from fsdp_advisor.policies.dtypes import FP32_BYTES, stored_bytes
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Stepped
from fsdp_advisor.program.accounts import Account
from fsdp_advisor.program.builder import StepBuilder
from fsdp_advisor.program.hooks import StepHooks
from fsdp_advisor.program.instructions import ADDED_TENSORS, NO_BUFFER, AllReduce, BufferId, Copy, HostTransfer
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""The sizes of DDP's buckets. Source: torch/nn/parallel/distributed.py (torch 2.13), `dist._DEFAULT_FIRST_BUCKET_BYTES`, bucket_cap_mb."""


@lru_cache(maxsize=64)
def buckets(profile: Profile, plan: Plan) -> Storages:
    """DDP's buckets in the first step: one for each dtype, with all its gradients. If DDP searches for unused parameters: buckets of
    1 MiB, then 25 MiB, over the parameters in reverse order; a bucket closes as soon as it has reached its limit.

    Source: `_ddp_init_helper`, bucket_size_limits; `compute_bucket_assignment_by_size` in reducer.cpp.
    """
    limits = (FIRST_BUCKET_BYTES, BUCKET_BYTES) if searches_unused(profile, plan) else (sys.maxsize, sys.maxsize)
    return _assigned(reversed([p for p in profile.in_order() if p.requires_grad]), plan, limits)


def _assigned(parameters: Iterable[Parameter], plan: Plan, limits: tuple[int, int]) -> Storages:
    """The buckets of these parameters. Each dtype has its own buckets. `limits`: bytes of a dtype's first bucket, and of its other
    buckets.
    """
    result = NO_STORAGES
    filled: dict[int, int] = {}  # by bytes per element, which identify the dtype
    first, others = limits
    limit: dict[int, int] = {}
    for parameter in parameters:
        element = stored_bytes(plan, parameter)
        filled[element] = filled.get(element, 0) + parameter.elements * element
        if filled[element] >= limit.get(element, first):
            result += Storages.of(filled.pop(element))
            limit[element] = others
    return sum(map(Storages.of, filled.values()), result)


def _ready_order(profile: Profile, tape: Tape) -> Iterator[Parameter]:
    """Parameters in the order in which backward completes their gradients. Of parameters that layers share the tape does not tell in which
    layer, so their model has the reverse order of its parameters.
    """
    if profile.shares_between_layers:
        yield from (p for p in reversed(list(profile.in_order())) if p.trainable)
        return
    backward = [segment for segment in tape.segments if segment.phase == "backward"]
    stacks: set[int] = set()
    for segment in backward:
        if segment.stack == ROOT:
            yield from _ready(profile, segment)
        elif segment.stack not in stacks:
            stacks.add(segment.stack)
            layers = {other.layer: other for other in backward if other.stack == segment.stack}
            for layer in reversed(profile.stacks[segment.stack].recorded_order):
                if layer in layers:
                    yield from _ready(profile, layers[layer])


def _ready(profile: Profile, segment: Segment) -> Iterator[Parameter]:
    for op, index, at_root in segment.events:
        if op == Op.GRAD_READY:
            yield unit_of(profile, AT_ROOT if at_root else UnitId(segment.stack, segment.layer)).parameters[index]


@lru_cache(maxsize=64)
def ddp_states(profile: Profile, plan: Plan) -> States:
    """The states of every rank: all parameters, gradients and optimizer states, and the buckets."""
    stepping = optimizer_of(plan)

    def of(parameter: Parameter) -> Storages:
        return Storages.of(parameter.elements * stored_bytes(plan, parameter))

    def parameters(unit: Unit) -> Storages:
        return sum(map(of, unit.parameters), NO_STORAGES)

    def gradients(unit: Unit) -> Storages:
        return sum((of(p) for p in unit.parameters if p.trainable), NO_STORAGES)

    def optimizer(unit: Unit) -> tuple[Storages, Storages]:
        return kept_state(stepping, (Stepped(p, p.shape, stored_bytes(plan, p)) for p in unit.parameters))

    return States(
        parameters=total(profile, parameters),
        gradients=NO_STORAGES if stepping.backward_update else total(profile, gradients),
        optimizer=total(profile, lambda unit: optimizer(unit)[0]) + stepping.shared_state,
        paged=total(profile, lambda unit: optimizer(unit)[1]) if stepping.is_paged else NO_STORAGES,
        communication=buckets(profile, plan) if plan.world_size > 1 else NO_STORAGES,
        buffers=buffers(profile, plan.param_bytes),
    )


class DdpStep(StepHooks):
    """DDP's hooks. Gradients are all-reduced in the last micro-batch only (`no_sync`)."""

    def __init__(self, profile: Profile, plan: Plan, tape: Tape | None) -> None:
        self._profile, self._plan, self._tape = profile, plan, tape
        self.marked_units = marked_units(profile, plan) | ({OUTPUTS.mark} if searches_unused(profile, plan) else set())
        self._optimizer = optimizer_of(plan)
        in_backward = self._optimizer.backward_update is not None
        self.gradient_hooks = plan.gradient_accumulation_steps > 1 or in_backward or self._optimizer.frees_gradients
        self.states = ddp_states(profile, plan.without_step)
        # State within one micro-batch
        self._is_first = self._is_last = True
        self._reduced_tail = False  # the head's gradients are reduced
        self._outputs: list[BufferId] = []  # copies of the model's outputs
        self._complete: tuple[Parameter, BufferId] | None = None  # a parameter that waits for its update in backward
        # State within one step
        self._of_parameter: defaultdict[tuple[UnitId, int], list[BufferId]] = defaultdict(list)

    def begin_step(self, step: StepBuilder) -> None:
        step.alloc(Account.PARAMETERS, self.states.parameters)
        step.alloc_in_first_step(Account.OPTIMIZER, self.states.optimizer)
        step.alloc(Account.OTHER, self.states.buffers)
        step.alloc(Account.COMMUNICATION, self.states.communication)

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first, self._is_last = is_first, is_last
        self._reduced_tail = False
        self._outputs = []
        self._complete = None
        if is_first:
            self._of_parameter.clear()

    def post_forward(self, step: StepBuilder, unit: UnitId) -> None:
        """Allocate the copies of the outputs that accelerate (logits in fp32) and DDP (clones, if it searches for unused
        parameters) return.

        Under autocast the encoder's output is in fp32 already. It is counted because nothing else keeps it alive.
        """
        has_copies = self._plan.loss_code == "full" and self._plan.task not in ("dpo", "kto")  # others are on the tape
        converts = self._plan.facts.converts_outputs and self._plan.mixed
        clones = searches_unused(self._profile, self._plan)
        if self._tape is None or not has_copies or not (converts or clones):
            return
        if self._plan.compile == "model":  # the loss is in the model's graph, so the tape has no storages of it
            logits = logits_per_batch(
                self._profile, FP32_BYTES if converts else output_bytes(self._profile, self._plan)
            )
        else:
            logits = logits_on(self._tape, self._profile, converted=converts)
        encoded = encoded_per_batch(self._profile, self._plan)
        if unit == AT_ROOT:
            self._outputs = [step.alloc(Account.LOSS, per_batch=logits)]
            self._outputs += [step.alloc(Account.LOSS, per_batch=encoded)] if clones else []
        elif unit == OUTPUTS:
            cloned = [logits, encoded] if converts and clones else []
            copies = [step.alloc(Account.LOSS, per_batch=each) for each in cloned]
            step.free(*self._outputs)
            step.free(*copies)

    def pre_backward(self, step: StepBuilder, unit: UnitId) -> None:
        if unit != AT_ROOT:
            self._reduce_tail(step)

    def layer_done(self, step: StepBuilder, unit: UnitId) -> None:
        self._to_host(step, unit)
        self._reduce(step, unit, unit_of(self._profile, unit))

    def _to_host(self, step: StepBuilder, unit: UnitId) -> None:
        """Copy the unit's gradients to the host if the optimizer updates them there."""
        trained = (
            p for p in unit_of(self._profile, unit).parameters if p.trainable and self._optimizer.on_host(p.elements)
        )
        if n_bytes := sum(p.elements * stored_bytes(self._plan, p) for p in trained):
            step.add(HostTransfer(unit, n_bytes, "gradients"))

    def gradient_ready(self, step: StepBuilder, unit: UnitId, parameter: int, gradient: BufferId) -> None:
        """The first micro-batch's gradient stays as `param.grad`; later ones are added to it and freed."""
        if self._optimizer.backward_update is not None:
            self._update(step)
            self._complete = unit_of(self._profile, unit).parameters[parameter], gradient
            if self._optimizer.backward_update == "own gradient":
                self._update(step)
        elif self._is_first:
            self._of_parameter[unit, parameter].append(gradient)
            step.reclassify(Account.GRADIENTS, gradient)
        else:
            step.free(gradient)

    def end_backward(self, step: StepBuilder) -> None:
        self._update(step)
        self._to_host(step, AT_ROOT)
        self._reduce_tail(step)
        self._reduce(step, AT_ROOT, self._profile.root, 1 - self._tail_share())
        step.reclassify(Account.GRADIENTS, *step.whole_gradients())

    def _update(self, step: StepBuilder) -> None:
        """Update the parameter whose gradient is complete, if the optimizer steps in backward. LOMO converts the gradient to fp32."""
        if self._complete is None:
            return
        parameter, gradient = self._complete
        element, converted = stored_bytes(self._plan, parameter), NO_BUFFER
        if converts := self._optimizer.backward_update == "next gradient" and element != FP32_BYTES:
            converted = step.alloc(Account.TEMPORARIES, Storages.of(FP32_BYTES * parameter.elements))
            step.free(gradient)
        step.transient(
            Account.TEMPORARIES,
            self._optimizer.step_temporaries(parameter, parameter.shape, element),
        )
        step.free(converted if converts else gradient)
        self._complete = None

    def optimizer_step(self, step: StepBuilder) -> None:
        step.transient(Account.TEMPORARIES, gradient_norms(self._profile, self._plan))
        if self._optimizer.backward_update is None:
            self._update_all(step)
        if copied := host_state_bytes(self._profile, self._plan):
            step.add(HostTransfer(AT_ROOT, 2 * copied, "states", exposed=True))
        step.add(gpu_step(self._profile, self._plan, self._profile.trainable_parameters))

    def _update_all(self, step: StepBuilder) -> None:
        """Allocate and free the temporaries of the update: those at its peak, or one after the other if the optimizer has a loop of its
        own.
        """
        events = optimizer_loop(self._profile, self._plan.without_batch)
        if not events:
            whole = optimizer_temporaries(self._profile, self._plan, lambda parameter: parameter.shape)
            step.transient(Account.TEMPORARIES, whole)
        buffers: dict[int, BufferId] = {}
        gradients = self._gradients_in_order() if any(number < 0 for number, _ in events) else []
        for number, n_bytes in events:
            if n_bytes:
                buffers[number] = step.alloc(Account.TEMPORARIES, Storages.of(n_bytes))
            else:
                step.free(gradients[-1 - number] if number < 0 else buffers.pop(number))

    def _gradients_in_order(self) -> list[BufferId]:
        """The gradients of all trainable parameters, in the order of `model.parameters()`. Backward has the layers in reverse."""
        waiting = {at: list(buffers) for at, buffers in self._of_parameter.items()}
        return [
            waiting[unit, index].pop() if waiting.get((unit, index)) else NO_BUFFER
            for unit, index, parameter in parameters_in_order(self._profile)
            if parameter.trainable
        ]

    def rebuilt_buckets(self, tape: Tape) -> Storages:
        """The buckets from the second step on. They follow the order in which gradients became ready in the first step, which has one
        bucket for all gradients. Empty if DDP searches for unused parameters: then the first bucket stays.

        Source: `_ddp_init_helper`, compute_bucket_size_limits; `rebuild_buckets` in reducer.cpp, called at the second forward.
        """
        searches = searches_unused(self._profile, self._plan)
        if self._plan.world_size == 1 or searches:
            return NO_STORAGES
        return _assigned(_ready_order(self._profile, tape.read()), self._plan, (FIRST_BUCKET_BYTES, BUCKET_BYTES))

    def _reduce_tail(self, step: StepBuilder) -> None:
        """Reduce the root's parameters that follow the last stack (the head's). DDP reduces them first."""
        if not self._reduced_tail:
            self._reduced_tail = True
            self._reduce(step, AT_ROOT, self._profile.root, self._tail_share())

    def _reduce(self, step: StepBuilder, unit: UnitId, parameters: Unit, share: float = 1.0) -> None:
        """Add the copies that sum these gradients with those of earlier micro-batches. In the last micro-batch, also copy the gradients
        into the buckets, reduce them and copy them back; `no_sync` skips this in the others (`Reducer::autograd_hook`).
        """
        if not share:
            return
        trained = (p for p in parameters.parameters if p.requires_grad)
        reduced = sum(p.elements * stored_bytes(self._plan, p) for p in trained)
        if not self._is_first and self._optimizer.backward_update is None:
            step.add(Copy(unit, ADDED_TENSORS * share * reduced))
        if self._is_last and self._plan.world_size > 1:
            step.add(Copy(unit, 4 * share * reduced))
            step.add(AllReduce(unit, share * reduced, "replica", messages=share * -(-reduced // BUCKET_BYTES)))

    def _tail_share(self) -> float:
        """The share of the root's elements that belong to parameters after the last stack."""
        order, root = self._profile.order, self._profile.root
        after = order[-1] if order else 0
        trained = sum(p.elements for p in root.parameters if p.requires_grad)
        return sum(p.elements for p in root.parameters[after:] if p.requires_grad) / trained if trained else 0.0
