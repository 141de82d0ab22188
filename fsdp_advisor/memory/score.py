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
    Category.SCRATCH: TEMPORARIES,
}

_ALLOC, _FREE, _GRAD_READY = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD_READY)
_GRADIENT, _LOSS, _SCRATCH = int(Category.GRADIENT), int(Category.LOSS), int(Category.SCRATCH)

Step = Block | tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Score:
    """A compiled tape. `forward` and `backward` are sequences of parts: a root segment, or a stack of recorded layers.

    `sizes` are the bytes behind each of the tape's sizes, rounded up; storages of the categories `left_out` are not there.
    """

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    tape: Tape
    sizes: tuple[int, ...]
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class Part:
    """`stack` is ROOT and `steps[0]` the segment; or `steps` are by recorded layer."""

    stack: int
    steps: dict[int, tuple[Step, ...]]


@lru_cache(maxsize=512)
def compile_tape(
    profile: Profile,
    tape: Tape,
    b: int,
    t: int,
    *,
    grad_marks: bool = False,
    fused_loss: bool = False,
    scratch: bool = False,
) -> Score:
    """The tape at micro-batch `b` and `t` tokens.

    `grad_marks` keeps the marks at which a parameter's gradient is ready; `fused_loss` leaves out what the loss makes;
    `scratch` counts kernels' own working memory, among the temporaries.
    """
    left_out = frozenset({_LOSS} if fused_loss else ()) | frozenset(() if scratch else {_SCRATCH})
    used = {a for births in tape.births for a, category in births if category not in left_out}
    sizes = [round_up(evaluate(p, b, t)) if i in used else 0 for i, p in enumerate(tape.sizes)]
    phases: dict[str, list[Part]] = {"forward": [], "backward": []}
    for index, segment in enumerate(tape.segments):
        steps = _fold(profile, tape, index, sizes, left_out, grad_marks)
        parts = phases[segment.phase]
        if segment.stack == ROOT or not parts or parts[-1].stack != segment.stack:
            parts.append(Part(segment.stack, {}))
        parts[-1].steps[segment.layer if segment.stack != ROOT else 0] = steps
    return Score(tuple(phases["forward"]), tuple(phases["backward"]), tape, tuple(sizes), left_out)


def stays_near(born: Segment, dying: Segment) -> bool:
    """Whether a storage that dies here was born in the same layer or next door: so it is in every repetition."""
    return born.stack == dying.stack != ROOT and abs(born.layer - dying.layer) <= 1


def _deaths(profile: Profile, born: Segment, dying: Segment) -> int:
    """How many real storages one recorded death stands for.

    A storage that dies in its own layer or next door dies there in every repetition. One that lives on to a distant place
    (autocast's cache of weights ends with the forward) dies there together with those of all layers that its layer stands for.
    """
    if born.stack == ROOT or stays_near(born, dying):
        return 1
    return profile.stacks[born.stack].counts[born.layer]


def _fold(
    profile: Profile, tape: Tape, index: int, sizes: list[int], left_out: frozenset[int], grad_marks: bool
) -> tuple[Step, ...]:
    segment = tape.segments[index]
    steps: list[Step] = []
    start = 0
    births = tape.births
    live = [0] * len(ACCOUNTS)
    high: tuple[int, ...] = tuple(live)
    total = high_total = layer_gradients = root_gradients = 0
    touched = False
    for at, (op, a, b) in enumerate(segment.events):
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
                steps.append(Block(tuple(live), high, high_total, layer_gradients, root_gradients, (index, start, at)))
                live = [0] * len(ACCOUNTS)
                high = tuple(live)
                total = high_total = layer_gradients = root_gradients = 0
                touched = False
            steps.append((op, a, b))
            start = at + 1
    if touched:
        end = len(segment.events)
        steps.append(Block(tuple(live), high, high_total, layer_gradients, root_gradients, (index, start, end)))
    return tuple(steps)
