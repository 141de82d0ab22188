"""A tape at one (B, T): sizes as numbers, and stretches between marks folded into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdp_advisor.memory.held import round_up
from fsdp_advisor.memory.ledger import (
    ACCOUNTS,
    ACTIVATIONS,
    LOSS,
    OTHER,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Block,
)
from fsdp_advisor.models.profile import ROOT, Category, Op, Profile, Segment, Tape, evaluate

_ACCOUNT: dict[int, int] = {  # plain integers: an enum would be built for every event
    Category.TEMPORARY: TEMPORARIES,
    Category.ACTIVATION: ACTIVATIONS,
    Category.LOSS: LOSS,
    Category.CAST_PARAMETER: UNSHARDED_PARAMETERS,
    Category.INPUT: OTHER,
    Category.UNSHARDED_GRADIENT: UNSHARDED_GRADIENTS,
}

_ALLOC, _FREE, _GRAD_READY, _GRADIENT = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD_READY), int(Category.GRADIENT)

Step = Block | tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Score:
    """A compiled tape. `forward` and `backward` are sequences of parts: a root segment, or a stack of recorded layers."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """`stack` is ROOT and `steps[0]` the segment; or `steps` are by recorded layer."""

    stack: int
    steps: dict[int, tuple[Step, ...]]


@lru_cache(maxsize=512)
def compile_tape(
    profile: Profile, tape: Tape, b: int, t: int, *, grad_marks: bool = False, fused_loss: bool = False
) -> Score:
    """The tape at micro-batch `b` and `t` tokens.

    `grad_marks` keeps the marks at which a parameter's gradient is ready; `fused_loss` leaves out what the loss makes.
    """
    left_out = frozenset({int(Category.SCRATCH), int(Category.LOSS)} if fused_loss else {int(Category.SCRATCH)})
    used = {a for births in tape.births for a, category in births if category not in left_out}
    sizes = [round_up(evaluate(p, b, t)) if i in used else 0 for i, p in enumerate(tape.sizes)]
    phases: dict[str, list[Part]] = {"forward": [], "backward": []}
    for segment in tape.segments:
        steps = _fold(profile, tape, segment, sizes, left_out, grad_marks)
        parts = phases[segment.phase]
        if segment.stack == ROOT or not parts or parts[-1].stack != segment.stack:
            parts.append(Part(segment.stack, {}))
        parts[-1].steps[segment.layer if segment.stack != ROOT else 0] = steps
    return Score(tuple(phases["forward"]), tuple(phases["backward"]))


def _deaths(profile: Profile, born: Segment, dying: Segment) -> int:
    """How many real storages one recorded death stands for.

    A storage that dies in its own layer or next door dies there in every repetition. One that lives on to a distant place
    (autocast's cache of weights ends with the forward) dies there together with those of all layers that its layer stands for.
    """
    if born.stack == ROOT or (born.stack == dying.stack and abs(born.layer - dying.layer) <= 1):
        return 1
    return profile.stacks[born.stack].counts[born.layer]


def _fold(
    profile: Profile, tape: Tape, segment: Segment, sizes: list[int], left_out: frozenset[int], grad_marks: bool
) -> tuple[Step, ...]:
    steps: list[Step] = []
    births = tape.births
    live = [0] * len(ACCOUNTS)
    high: tuple[int, ...] = tuple(live)
    total = high_total = layer_gradients = root_gradients = 0
    touched = False
    for op, a, b in segment.events:
        if op == _ALLOC:
            if b in left_out:
                continue
            n_bytes = sizes[a]
            if b >= _GRADIENT:
                account = UNSHARDED_GRADIENTS
                if (b - _GRADIENT) & 1:
                    root_gradients += n_bytes
                else:
                    layer_gradients += n_bytes
            else:
                account = _ACCOUNT[b]
            live[account] += n_bytes
            total += n_bytes
            touched = True
            if total > high_total:
                high_total, high = total, tuple(live)
        elif op == _FREE:
            size, category = births[a][b]
            if category in left_out:
                continue
            n_bytes = sizes[size] * _deaths(profile, tape.segments[a], segment)
            live[UNSHARDED_GRADIENTS if category >= _GRADIENT else _ACCOUNT[category]] -= n_bytes
            total -= n_bytes
            touched = True
        elif op != _GRAD_READY or grad_marks:
            if touched:
                steps.append(Block(tuple(live), high, high_total, layer_gradients, root_gradients))
                live = [0] * len(ACCOUNTS)
                high = tuple(live)
                total = high_total = layer_gradients = root_gradients = 0
                touched = False
            steps.append((op, a, b))
    if touched:
        steps.append(Block(tuple(live), high, high_total, layer_gradients, root_gradients))
    return tuple(steps)
