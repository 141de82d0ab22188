"""A tape as a schedule plays it: stretches between marks; and those stretches at one (B, T).

What happens on a tape, and in which order, does not depend on B and T: a `Score` is made once. At one (B, T) each stretch then
comes to two numbers, what it leaves behind and how high it rises (`Sized`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import cast

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.memory.held import round_up
from fsdp_advisor.memory.ledger import (
    ACTIVATIONS,
    LOSS,
    OTHER,
    SCRATCH,
    TEMPORARIES,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Stretch,
)
from fsdp_advisor.memory.staging import staging_bytes
from fsdp_advisor.memory.wrapping import Marks, marked
from fsdp_advisor.models.profile import ROOT, Category, Op, Polynomial, Profile, Segment, Staging, Tape, evaluate

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

Mark = tuple[int, int, int]
Step = Stretch | Mark
Pick = Callable[[Sequence[int]], tuple[int, ...]]
ByAccount = tuple[tuple[int, int], ...]
"""(account, bytes), of those that change."""
Events = tuple[int, int, int, bool]
"""Where a stretch stands on the tape: (segment, first event, end), and whether it is of the `last` layer (`Part`)."""


@dataclass(frozen=True, slots=True)
class Part:
    """`stack` is ROOT and `steps[0]` the segment; or `steps` are by recorded layer.

    `last` are those of the last real layer, in the order of the pass, that a recorded one stands for, where they are others: what
    many layers share (a mask that the root made) dies there, once.
    """

    stack: int
    steps: dict[int, tuple[Step, ...]]
    last: dict[int, tuple[Step, ...]]


@dataclass(frozen=True, eq=False)
class Shape:
    """What a schedule hears of a score: marks, and numbered stretches with the gradients born in them. `forward` and
    `backward` are sequences of parts: a root segment, or a stack of recorded layers. Tapes that differ in sizes alone (those
    of two attention kernels) have one and the same shape.
    """

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    stretches: int


@dataclass(frozen=True, slots=True)
class _Changes:
    """Births and deaths in order: `pick` takes their bytes from the score's `moves`, `accounts` are theirs.

    `left` are the moves that they come to, by account: most of what is born dies in the same stretch.
    """

    accounts: bytes
    pick: Pick
    left: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class Score:
    """A tape's stretches. Storages of the categories `left_out` are not there.

    `events` says where each stretch stands on the tape, `distinct` which of `changes` it makes: layers of a kind make the same.
    `sizes` are those of the tape's that something has which is there: `polynomials`, then `stagings`; `moves` how often
    (negative: it dies) which of them.
    """

    left_out: frozenset[int]
    shape: Shape
    events: tuple[Events, ...]
    distinct: tuple[int, ...]
    changes: tuple[_Changes, ...]
    sizes: tuple[int, ...]
    polynomials: tuple[Polynomial, ...]
    stagings: tuple[Staging, ...]
    moves: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Sized:
    """A score at one (B, T): by stretch, the bytes that it leaves behind (`net`), and how much higher it rises on the way
    than where it begins (`high`). `sizes` are the bytes of the score's sizes, `moves` those of its moves.
    """

    score: Score
    sizes: tuple[int, ...]
    moves: tuple[int, ...]
    net: tuple[int, ...]
    high: tuple[int, ...]
    _by_account: dict[int, ByAccount] = field(default_factory=dict)

    def net_by_account(self, stretch: int) -> ByAccount:
        """What a stretch leaves behind."""
        distinct = self.score.distinct[stretch]
        if distinct not in self._by_account:
            left = self.score.changes[distinct].left
            self._by_account[distinct] = tuple(
                [(account, sum([self.moves[move] for move in moves])) for account, moves in left]
            )
        return self._by_account[distinct]

    def highest_by_account(self, stretch: int) -> ByAccount:
        """What a stretch has made when it is first at its highest."""
        changes = self.score.changes[self.score.distinct[stretch]]
        moved = changes.pick(self.moves)
        end = list(accumulate(moved)).index(self.high[stretch]) + 1 if self.high[stretch] else 0
        live: defaultdict[int, int] = defaultdict(int)
        for account, n_bytes in zip(changes.accounts, moved[:end], strict=False):
            live[account] += n_bytes
        return tuple(live.items())


@lru_cache(maxsize=128)
def sized(score: Score, b: int, t: int, resident_threads: int = 0) -> Sized:
    """The score at micro-batch `b` and `t` tokens, each storage rounded up, on a GPU that runs so many threads at once."""
    sizes = tuple(
        [round_up(evaluate(polynomial, b, t)) for polynomial in score.polynomials]
        + [
            round_up(staging_bytes(evaluate(rows, b, t), evaluate(columns, b, t), resident_threads))
            for rows, columns in score.stagings
        ]
    )
    moves = tuple([sizes[size] * times for size, times in score.moves])
    net, high = [], []
    for changes in score.changes:
        levels = list(accumulate(changes.pick(moves)))
        net.append(levels[-1])
        high.append(max(0, max(levels)))
    spread = picker(score.distinct)
    return Sized(score, sizes, moves, spread(net), spread(high))


def picker(indices: Sequence[int]) -> Pick:
    """What takes the values at `indices` from a row: `itemgetter`, as a tuple whatever their number.

    >>> picker([2, 0, 2])("abc"), picker([1])("abc"), picker([])("abc")
    (('c', 'a', 'c'), ('b',), ())
    """
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda row: tuple([row[i] for i in indices])


@lru_cache(maxsize=512)
def score_of(
    profile: Profile,
    tape: Tape,
    marks: Marks = "none",
    *,
    grad_marks: bool = False,
    fused_loss: bool = False,
    scratch: bool = False,
) -> Score:
    """`grad_marks` keeps the marks at which a parameter's gradient is ready; `fused_loss` leaves out what the loss makes;
    `scratch` counts kernels' own working memory.
    """
    left_out = frozenset({_LOSS} if fused_loss else ()) | frozenset(() if scratch else {_SCRATCH})
    return _Reader(profile, marked(profile, tape, marks), left_out, grad_marks).score()


def stays_near(born: Segment, dying: Segment) -> bool:
    """Whether a storage that dies here was born in the same layer or next door: so it is in every repetition.

    What comes from farther away dies once: with the last real layer that the recorded one stands for.
    """
    return born.stack == dying.stack != ROOT and abs(born.layer - dying.layer) <= 1


class _Reader:
    """Reads a tape once, from end to end."""

    def __init__(self, profile: Profile, tape: Tape, left_out: frozenset[int], grad_marks: bool) -> None:
        self._profile, self._left_out, self._grad_marks = profile, left_out, grad_marks
        self._tape = tape.read()
        self._moves: dict[tuple[int, int], int] = {}  # (one of the tape's sizes, how often): its number
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._events: list[Events] = []
        self._distinct: list[int] = []

    def score(self) -> Score:
        phases: dict[str, list[Part]] = {"forward": [], "backward": []}
        for index, segment in enumerate(self._tape.segments):
            parts = phases[segment.phase]
            if segment.stack == ROOT or not parts or parts[-1].stack != segment.stack:
                parts.append(Part(segment.stack, {}, {}))
            layer = segment.layer if segment.stack != ROOT else 0
            differs = self._last_differs(segment)
            parts[-1].steps[layer] = tuple(self._steps(index, last=not differs))
            if differs:
                parts[-1].last[layer] = tuple(self._steps(index, last=True))
        forward, backward = (
            tuple((p.stack, tuple(p.steps.items()), tuple(p.last.items())) for p in parts) for parts in phases.values()
        )
        shape = _shape(forward, backward, len(self._events))
        changes = tuple(
            [_Changes(accounts, picker(moves), self._left(moves, accounts)) for moves, accounts in self._known]
        )
        polynomials: dict[int, Polynomial] = {}
        stagings: dict[int, Staging] = {}
        for size, _ in self._moves:
            if isinstance(known := self._tape.sizes[size], Staging):
                stagings[size] = known
            else:
                polynomials[size] = known
        sizes = {size: number for number, size in enumerate((*polynomials, *stagings))}
        return Score(
            left_out=self._left_out,
            shape=shape,
            events=tuple(self._events),
            distinct=tuple(self._distinct),
            changes=changes,
            sizes=tuple(sizes),
            polynomials=tuple(polynomials.values()),
            stagings=tuple(stagings.values()),
            moves=tuple([(sizes[size], times) for size, times in self._moves]),
        )

    def _last_differs(self, segment: Segment) -> bool:
        """Whether many real layers stand behind this one, and with the last of them dies what the others leave."""
        if segment.stack == ROOT or self._profile.stacks[segment.stack].counts[segment.layer] == 1:
            return False
        born_in = {a for op, a, _ in segment.events if op == _FREE}
        return not all(stays_near(self._tape.segments[a], segment) for a in born_in)

    def _steps(self, index: int, last: bool) -> Iterable[Step]:
        segment, births, left_out, known = self._tape.segments[index], self._tape.births, self._left_out, self._moves
        moves: list[int] = []
        accounts: list[int] = []
        gradients: defaultdict[str, int] = defaultdict(int)
        deaths: dict[int, int] = {}  # by the segment of birth
        start = 0

        def close(end: int) -> Iterable[Stretch]:
            if moves:
                yield Stretch(number=len(self._events), **gradients)
                changes = tuple(moves), bytes(accounts)
                self._distinct.append(self._known.setdefault(changes, len(self._known)))
                self._events.append((index, start, end, last))
                moves.clear()
                accounts.clear()
                gradients.clear()

        for at, (op, a, b) in enumerate(segment.events):
            if op == _ALLOC:
                size, category, times = a, b, 1
            elif op == _FREE:
                size, category = births[a][b]
                if a not in deaths:
                    deaths[a] = self._deaths(self._tape.segments[a], segment, last)
                times = -deaths[a]
            else:
                if op != _GRAD_READY or self._grad_marks:
                    yield from close(at)
                    yield op, a, b
                    start = at + 1
                continue
            if category in left_out or not times:
                continue
            account = _ACCOUNT.get(category, UNSHARDED_GRADIENTS)
            if account == UNSHARDED_GRADIENTS:
                n_bytes = self._constant(size)
                gradients["net_gradients"] += n_bytes * times
                if category >= _GRADIENT and times > 0:
                    gradients["root_gradients" if (category - _GRADIENT) & 1 else "layer_gradients"] += n_bytes
            move = known.get((size, times))
            if move is None:
                move = known[size, times] = len(known)
            moves.append(move)
            accounts.append(account)
        yield from close(len(segment.events))

    def _deaths(self, born: Segment, dying: Segment, last: bool) -> int:
        """How many real storages one recorded death stands for.

        What comes from farther away than next door dies with the last real layer. Of one that lives on to a distant place
        (autocast's cache of weights ends with the forward) those of all layers die there that its layer stands for.
        """
        near = stays_near(born, dying)
        if not near and not last:
            return 0
        return 1 if near or born.stack == ROOT else self._profile.stacks[born.stack].counts[born.layer]

    def _left(self, moves: Iterable[int], accounts: Iterable[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        known, left = list(self._moves), Counter[tuple[int, int]]()
        for move, account in zip(moves, accounts, strict=True):
            size, times = known[move]
            left[account, size] += times
        by_account: defaultdict[int, list[int]] = defaultdict(list)
        for (account, size), times in left.items():
            if times:
                by_account[account].append(self._moves.setdefault((size, times), len(self._moves)))
        return tuple([(account, tuple(moves)) for account, moves in by_account.items()])

    def _constant(self, size: int) -> int:
        """A gradient has the shape of its parameter, whatever B and T are. Raises NotRecordable for a sparse one, which has not."""
        constant, *others = cast(Polynomial, self._tape.sizes[size])
        if any(others):
            raise NotRecordable("a gradient's size depends on the batch", hint="gradients must be dense: sparse=False")
        return round_up(constant)


_ByLayer = tuple[tuple[int, tuple[Step, ...]], ...]
_Parts = tuple[tuple[int, _ByLayer, _ByLayer], ...]


@lru_cache(maxsize=512)
def _shape(forward: _Parts, backward: _Parts, stretches: int) -> Shape:
    """One object for all that are equal."""

    def parts(rows: _Parts) -> tuple[Part, ...]:
        return tuple(Part(stack, dict(steps), dict(last)) for stack, steps, last in rows)

    return Shape(parts(forward), parts(backward), stretches)
