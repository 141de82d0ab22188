"""PyTorch DistributedDataParallel with its defaults, and one GPU alone.

Source: torch.nn.parallel.distributed and torch/csrc/distributed/c10d/reducer.cpp (torch 2.13): buckets of 1 MiB, then 25 MiB,
over the parameters in reverse order, allocated once; `gradient_as_bucket_view=False` makes them a second copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from fsdp_advisor.engines.fsdp2.schedule import gradient_norms, optimizer_temporaries
from fsdp_advisor.engines.units import buffers, total
from fsdp_advisor.engines.wrapping import OUTPUTS, clones_outputs, encoded_elements, logits_elements
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.ledger import (
    AT_ROOT,
    COMMUNICATION,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    Place,
)
from fsdp_advisor.memory.storages import NO_STORAGES, States, Storages, round_up
from fsdp_advisor.model.profile import ROOT, Op, Parameter, Profile, Segment, Tape, Unit
from fsdp_advisor.policies.optimizers import optimizer_named

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


@lru_cache(maxsize=256)
def buckets(profile: Profile, element_bytes: int) -> Storages:
    """DDP's buckets: parameters in reverse order, a bucket closed as soon as it has reached its limit.

    Source: `compute_bucket_assignment_by_size` in reducer.cpp.
    """
    return _assigned(reversed([p for p in profile.in_order() if p.trainable]), element_bytes)


def _assigned(parameters: Iterable[Parameter], element_bytes: int) -> Storages:
    result, filled, limit = NO_STORAGES, 0, FIRST_BUCKET_BYTES
    for parameter in parameters:
        filled += parameter.elements * element_bytes
        if filled >= limit:
            result += Storages.of(filled)
            filled, limit = 0, BUCKET_BYTES
    return result + Storages.of(filled)


def rebuilt_buckets(profile: Profile, tape: Tape, plan: Plan) -> Storages:
    """The buckets from the second step on, in the order in which the first step's gradients were ready. NOTHING where the first
    ones stay: where DDP searches for unused parameters. Until then one bucket has all gradients.

    Source: `_ddp_init_helper`, compute_bucket_size_limits; `rebuild_buckets` in reducer.cpp, at the second forward's beginning.
    """
    if plan.world_size == 1 or clones_outputs(plan):
        return NO_STORAGES
    return _assigned(_as_ready(profile, tape), plan.param_bytes)


def _as_ready(profile: Profile, tape: Tape) -> Iterator[Parameter]:
    """Parameters in the order in which backward is done with their gradients."""
    backward = [segment for segment in tape.segments if segment.phase == "backward"]
    stacks: set[int] = set()
    for segment in backward:
        if segment.stack == ROOT:
            yield from _ready(profile, segment)
        elif segment.stack not in stacks:
            stacks.add(segment.stack)
            layers = {other.layer: other for other in backward if other.stack == segment.stack}
            for run in reversed(profile.stacks[segment.stack].runs):
                for layer in run.pattern[::-1] * run.repeats:
                    yield from _ready(profile, layers[layer])


def _ready(profile: Profile, segment: Segment) -> Iterator[Parameter]:
    for op, index, at_root in segment.events:
        if op == Op.GRAD_READY:
            unit = profile.root if at_root else profile.stacks[segment.stack].units[segment.layer]
            yield unit.parameters[index]


@lru_cache(maxsize=256)
def _states(profile: Profile, plan: Plan) -> States:
    """Of any batch: what is kept."""
    element = plan.param_bytes

    def parameters(unit: Unit) -> Storages:
        return sum((Storages.of(p.elements * element) for p in unit.parameters), NO_STORAGES)

    def gradients(unit: Unit) -> Storages:
        return sum((Storages.of(p.elements * element) for p in unit.parameters if p.trainable), NO_STORAGES)

    stepping = optimizer_named(plan.optim)

    def optimizer(unit: Unit) -> Storages:
        return sum((stepping.state_storages(p, p.shape, element) for p in unit.parameters if p.trainable), NO_STORAGES)

    return States(
        parameters=total(profile, parameters),
        gradients=total(profile, gradients),
        optimizer=total(profile, optimizer),
        communication=buckets(profile, element) if plan.world_size > 1 else NO_STORAGES,
        buffers=buffers(profile),
    )


class DdpSchedule:
    distinct_micro_batches = 2
    made_by_first_step = frozenset({OPTIMIZER})
    walk_all: frozenset[str] = frozenset()

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile, self._plan = profile, plan
        self.grad_marks = plan.gradient_accumulation_steps > 1
        element = 2 if plan.precision == "bf16" else 4
        self._logits = Storages.of(logits_elements(profile, plan) * element)
        self._encoded = Storages.of(encoded_elements(profile, plan) * element)
        self.states = _states(profile, plan.any_batch)

    def begin_step(self, ledger: Ledger) -> None:
        ledger.born(PARAMETERS, self.states.parameters)
        ledger.born(OPTIMIZER, self.states.optimizer)
        ledger.born(OTHER, self.states.buffers)
        ledger.born(COMMUNICATION, self.states.communication)

    def begin_micro_batch(self, ledger: Ledger, index: int) -> None:
        self._accumulating = index > 0

    def pre_forward(self, ledger: Ledger, place: Place) -> None:
        pass

    def post_forward(self, ledger: Ledger, place: Place) -> None:
        """accelerate gives the logits out in fp32; where DDP searches for unused parameters, it gives out clones.

        What the encoder gave out has fp32 already, but under autocast nothing else keeps it.
        """
        converts, clones = self._plan.prepared and self._plan.mixed, clones_outputs(self._plan)
        if place == AT_ROOT:
            outputs = self._logits + (self._encoded if clones else NO_STORAGES)
            self._outputs = ledger.born(LOSS, outputs if converts or clones else NO_STORAGES)
        elif place == OUTPUTS:
            clone = ledger.born(LOSS, self._logits + self._encoded if converts and clones else NO_STORAGES)
            ledger.died(self._outputs)
            ledger.died(clone)

    def pre_backward(self, ledger: Ledger, place: Place, following: Place | None) -> None:
        pass

    def post_backward(self, ledger: Ledger, place: Place) -> None:
        pass

    def gradient_ready(self, ledger: Ledger, place: Place, parameter: int) -> None:
        """The first micro-batch's gradient stays as `param.grad`; later ones are added to it and dropped."""
        unit = self._profile.root if place == AT_ROOT else self._profile.stacks[place[0]].units[place[1]]
        n_bytes = round_up(unit.parameters[parameter].elements * self._plan.param_bytes)
        gradient = ledger.gradient(parameter, place == AT_ROOT, n_bytes)
        if self._accumulating:
            ledger.died(gradient)
        else:
            ledger.turned(gradient, GRADIENTS)

    def end_backward(self, ledger: Ledger) -> None:
        ledger.turned(ledger.all_gradients(), GRADIENTS)

    def optimizer_step(self, ledger: Ledger) -> None:
        ledger.died(ledger.born(TEMPORARIES, gradient_norms(self._profile, self._plan)))
        temporaries = optimizer_temporaries(self._profile, self._plan, lambda p: p.shape)
        ledger.died(ledger.born(TEMPORARIES, temporaries))
