"""A tape at one (B, T): sizes as numbers, and stretches between marks folded into blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

from fsdp_advisor.memory.held import round_up
from fsdp_advisor.memory.ledger import (
    ACTIVATIONS,
    LOSS,
    OTHER,
    SCRATCH,
    SLOTS,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Block,
    changed,
)
from fsdp_advisor.models.profile import ROOT, Category, Op, Polynomial, Profile, Segment, Tape, evaluate

_ACCOUNT: dict[int, int] = {  # plain integers: an enum would be built for every event
    Category.TEMPORARY: TEMPORARIES,
    Category.ACTIVATION: ACTIVATIONS,
    Category.LOSS: LOSS,
    Category.CAST_PARAMETER: UNSHARDED_PARAMETERS,
    Category.INPUT: OTHER,
    Category.UNSHARDED_GRADIENT: UNSHARDED_GRADIENTS,
    Category.SCRATCH: SCRATCH,
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
    `scratch` counts kernels' own working memory.
    """
    left_out = frozenset({_LOSS} if fused_loss else ()) | frozenset(() if scratch else {_SCRATCH})
    sizes = [0] * len(tape.sizes)
    for i, polynomial in _used(tape, left_out):
        sizes[i] = round_up(evaluate(polynomial, b, t))
    known: dict[int, Callable[[Events], Block]] = {}

    def block(stretch: _Stretch) -> Block:
        """Layers of a kind make the same changes: they are added up once."""
        made = known.get(id(stretch.changes))
        if made is None:
            made = known[id(stretch.changes)] = _added_up(stretch.changes, sizes)
        return made(stretch.events)

    phases: dict[str, list[Part]] = {"forward": [], "backward": []}
    for segment, stretches in zip(tape.segments, _stretches(profile, tape, left_out, grad_marks), strict=True):
        steps = tuple([block(s) if isinstance(s, _Stretch) else s for s in stretches])
        parts = phases[segment.phase]
        if segment.stack == ROOT or not parts or parts[-1].stack != segment.stack:
            parts.append(Part(segment.stack, {}))
        parts[-1].steps[segment.layer if segment.stack != ROOT else 0] = steps
    return Score(tuple(phases["forward"]), tuple(phases["backward"]), tape, tuple(sizes), left_out)


@lru_cache(maxsize=2048)
def _used(tape: Tape, left_out: frozenset[int]) -> tuple[tuple[int, Polynomial], ...]:
    """The sizes that something has which is not left out, with their indices."""
    used = {a for births in tape.births for a, category in births if category not in left_out}
    return tuple((i, tape.sizes[i]) for i in sorted(used))


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


Events = tuple[int, int, int]
"""Where a stretch stands on the tape: (segment, first event, end)."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Births and deaths in order, each by the index of its size, how often it counts (negative: it dies), and its account.

    `layer` and `root` are the sizes of the gradients born in it. None of it depends on B and T.
    """

    sizes: tuple[int, ...]
    times: tuple[int, ...]
    accounts: tuple[int, ...]
    layer: tuple[int, ...]
    root: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What happens between two marks. `changes` that are equal are one object, all over the tape."""

    changes: _Changes
    events: Events


@lru_cache(maxsize=2048)
def _stretches(
    profile: Profile, tape: Tape, left_out: frozenset[int], grad_marks: bool
) -> tuple[tuple[_Stretch | tuple[int, int, int], ...], ...]:
    """Each of the tape's segments as stretches and marks."""
    known: dict[_Changes, _Changes] = {}
    return tuple(_segment(profile, tape, index, left_out, grad_marks, known) for index in range(len(tape.segments)))


def _segment(
    profile: Profile,
    tape: Tape,
    index: int,
    left_out: frozenset[int],
    grad_marks: bool,
    known: dict[_Changes, _Changes],
) -> tuple[_Stretch | tuple[int, int, int], ...]:
    segment, births = tape.segments[index], tape.births
    steps: list[_Stretch | tuple[int, int, int]] = []
    changes: list[tuple[int, int, int]] = []
    layer: list[int] = []
    root: list[int] = []
    start = 0

    def close(end: int) -> None:
        if changes:
            sizes, times, accounts = zip(*changes, strict=True)
            made = _Changes(sizes, times, accounts, tuple(layer), tuple(root))
            steps.append(_Stretch(known.setdefault(made, made), (index, start, end)))
            for kept in (changes, layer, root):
                kept.clear()

    for at, (op, a, b) in enumerate(segment.events):
        if op == _ALLOC:
            if b in left_out:
                continue
            if b >= _GRADIENT:
                (root if (b - _GRADIENT) & 1 else layer).append(a)
            changes.append((a, 1, _account(b)))
        elif op == _FREE:
            size, category = births[a][b]
            if category not in left_out:
                changes.append((size, -_deaths(profile, tape.segments[a], segment), _account(category)))
        elif op != _GRAD_READY or grad_marks:
            close(at)
            steps.append((op, a, b))
            start = at + 1
    close(len(segment.events))
    return tuple(steps)


def _account(category: int) -> int:
    return UNSHARDED_GRADIENTS if category >= _GRADIENT else _ACCOUNT[category]


def _added_up(stretch: _Changes, sizes: list[int]) -> Callable[[Events], Block]:
    """A stretch at one (B, T), to be had wherever it stands."""
    changes = [sizes[size] * times for size, times in zip(stretch.sizes, stretch.times, strict=True)]
    totals = list(accumulate(changes))
    high_total = max(totals)
    highest = totals.index(high_total) + 1 if high_total > 0 else 0
    live = [0] * SLOTS
    high = live
    for at, (account, n_bytes) in enumerate(zip(stretch.accounts, changes, strict=True)):
        if at == highest:
            high = list(live)
        live[account] += n_bytes
    return partial(
        Block,
        changed(live),
        tuple(high if highest < len(changes) else live),
        max(high_total, 0),
        sum([sizes[size] for size in stretch.layer]),
        sum([sizes[size] for size in stretch.root]),
    )
