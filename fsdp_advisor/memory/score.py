"""A tape as a schedule plays it: stretches between marks; and those stretches at one (B, T).

What happens on a tape, and in which order, does not depend on B and T: a `Score` is made once. At one (B, T) each stretch then
comes to two numbers, what it leaves behind and how high it rises (`Sized`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter, mul
from typing import cast

from fsdp_advisor.errors import NotRecordable
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
from fsdp_advisor.memory.storages import round_up
from fsdp_advisor.model.profile import (
    ROOT,
    Category,
    MarkedUnit,
    Op,
    Polynomial,
    Profile,
    Segment,
    Staging,
    Tape,
    evaluate,
    evaluate_all,
)

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
Change = tuple[int, int, int]
"""(account, size, times): storages of one size are born, or die where `times` is negative."""
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
    """Births and deaths in order, as `between_heights` has them: `pick` takes their bytes from the score's `moves`, `accounts`
    are theirs. `left` is what they come to: most of what is born dies in the same stretch.
    """

    accounts: bytes
    pick: Pick
    left: tuple[Change, ...]


class Balance:
    """What births and deaths come to, whatever B and T are: storages of which of a score's sizes, how many, in which account."""

    __slots__ = ("_accounts", "_pick", "_times")

    def __init__(self, changes: Mapping[tuple[int, int], int]) -> None:
        """`changes`: how many by (account, size)."""
        alive = {key: times for key, times in changes.items() if times}
        self._accounts = bytes([account for account, _ in alive])
        self._pick = picker([size for _, size in alive])
        self._times = tuple(alive.values())

    def at(self, sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """(account, bytes) of each, where the score's sizes are these."""
        return zip(self._accounts, map(mul, self._pick(sizes), self._times), strict=True)


@dataclass(frozen=True, eq=False)
class Score:
    """A tape's stretches. Storages of the categories `left_out` are not there.

    `events` says where each stretch stands on the tape, `distinct` which of `changes` it makes: layers of a kind make the same.
    `sizes` are those of the tape's that something has which is there. `moved` picks from them what is born or dies at once, `times`
    says how often (negative: it dies). `stagings` are those of no polynomial, by their place among the sizes.
    """

    left_out: frozenset[int]
    shape: Shape
    events: tuple[Events, ...]
    distinct: tuple[int, ...]
    changes: tuple[_Changes, ...]
    sizes: tuple[int, ...]
    polynomials: tuple[Polynomial, ...]
    stagings: tuple[tuple[int, Staging], ...]
    moved: Pick
    times: tuple[int, ...]


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

    def highest_by_account(self, stretch: int) -> Iterable[tuple[int, int]]:
        """(account, bytes) of what a stretch has made and dropped when it is first at its highest."""
        changes = self.score.changes[self.score.distinct[stretch]]
        moved = changes.pick(self.moves)
        end = list(accumulate(moved, initial=0)).index(self.high[stretch])
        return zip(changes.accounts, moved[:end], strict=False)


_NONE: Polynomial = (0, 0, 0, 0, 0, 0)


@lru_cache(maxsize=128)
def sized(score: Score, b: int, t: int, resident_threads: int = 0) -> Sized:
    """The score at micro-batch `b` and `t` tokens, each storage rounded up, on a GPU that runs so many threads at once."""
    at = evaluate_all(score.polynomials, b, t)
    for size, (rows, columns) in score.stagings:
        at[size] = staging_bytes(evaluate(rows, b, t), evaluate(columns, b, t), resident_threads)
    sizes = tuple(map(round_up, at))
    moves = tuple(map(mul, score.moved(sizes), score.times))
    net, high = [], []
    for changes in score.changes:
        levels = list(accumulate(changes.pick(moves), initial=0))
        net.append(levels[-1])
        high.append(max(levels))
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
    units: frozenset[int] = frozenset(),
    *,
    grad_marks: bool = False,
    fused_loss: bool = False,
    scratch: bool = False,
) -> Score:
    """`units` are those (`MarkedUnit`) whose marks are kept, in addition to those of layers and root. `grad_marks` keeps the marks
    at which a parameter's gradient is ready; `fused_loss` leaves out what the loss makes; `scratch` counts kernels' own working memory.
    """
    left_out = frozenset({_LOSS} if fused_loss else ()) | frozenset(() if scratch else {_SCRATCH})
    return _Reader(profile, tape, left_out, grad_marks, units | {MarkedUnit.LAYER, MarkedUnit.ROOT}).score()


def stays_near(born: Segment, dying: Segment) -> bool:
    """Whether a storage that dies here was born in the same layer or next door: so it is in every repetition.

    What comes from farther away dies once: with the last real layer that the recorded one stands for.
    """
    return born.stack == dying.stack != ROOT and abs(born.layer - dying.layer) <= 1


def between_heights(changes: Iterable[Change]) -> list[Change]:
    """Births and deaths that rise as high as these, whatever the sizes are, and come to the same; they are about half as many.

    A stretch can only be at its highest where no other moment of it has all that is alive there, and more. From one such moment
    to the next, what is born and dies in between does not count.

    >>> between_heights([(0, 1, 1), (0, 2, 1), (0, 2, -1), (0, 3, 1), (0, 4, 1), (0, 4, -1), (0, 3, -1)])
    [(0, 1, 1), (0, 2, 1), (0, 2, -1), (0, 3, 1), (0, 4, 1), (0, 4, -1), (0, 3, -1)]
    >>> between_heights([(0, 1, 1), (0, 2, 1), (0, 2, -1), (0, 2, 1), (0, 3, 1), (0, 2, -1), (0, 1, -1)])
    [(0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 2, -1), (0, 1, -1)]
    """
    heights: list[defaultdict[tuple[int, int], int]] = []  # what each has more than the one before, or less
    since: defaultdict[tuple[int, int], int] = defaultdict(int)
    for births, some in groupby(changes, lambda change: change[2] > 0):
        for account, size, times in some:
            since[account, size] += times
        if births and max(since.values()) > 0:
            while heights and min(since.values()) >= 0:
                for key, times in since.items():
                    heights[-1][key] += times
                since = heights.pop()
            heights.append(since)
            since = defaultdict(int)
    return [
        (account, size, times)
        for rise in (*heights, since)
        for (account, size), times in sorted(rise.items(), key=lambda change: change[1] > 0)  # first what dies
        if times
    ]


class _Reader:
    """Reads a tape once, from end to end."""

    def __init__(
        self, profile: Profile, tape: Tape, left_out: frozenset[int], grad_marks: bool, units: frozenset[int]
    ) -> None:
        self._profile, self._left_out, self._grad_marks = profile, left_out, grad_marks
        self._units = units
        self._tape = tape.read()
        self._sizes: dict[int, int] = {}  # the tape's: its number in the score
        self._moves: dict[tuple[int, int], int] = {}  # (size, times): its number
        self._known: dict[
            tuple[Change, ...], int
        ] = {}  # all that happens in a stretch: its number among the distinct ones
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
        changes = tuple([self._changes(between_heights(known)) for known in self._known])
        sizes = [self._tape.sizes[size] for size in self._sizes]
        return Score(
            left_out=self._left_out,
            shape=shape,
            events=tuple(self._events),
            distinct=tuple(self._distinct),
            changes=changes,
            sizes=tuple(self._sizes),
            polynomials=tuple([_NONE if isinstance(size, Staging) else size for size in sizes]),
            stagings=tuple([(at, size) for at, size in enumerate(sizes) if isinstance(size, Staging)]),
            moved=picker([size for size, _ in self._moves]),
            times=tuple([times for _, times in self._moves]),
        )

    def _last_differs(self, segment: Segment) -> bool:
        """Whether many real layers stand behind this one, and with the last of them dies what the others leave."""
        if segment.stack == ROOT or self._profile.stacks[segment.stack].counts[segment.layer] == 1:
            return False
        born_in = {a for op, a, _ in segment.events if op == _FREE}
        return not all(stays_near(self._tape.segments[a], segment) for a in born_in)

    def _steps(self, index: int, last: bool) -> Iterable[Step]:
        segment, births, left_out = self._tape.segments[index], self._tape.births, self._left_out
        made: list[Change] = []
        gradients: defaultdict[str, int] = defaultdict(int)
        deaths: dict[int, int] = {}  # by the segment of birth
        start = 0

        def close(end: int) -> Iterable[Stretch]:
            if made:
                yield Stretch(number=len(self._events), **gradients)
                self._distinct.append(self._known.setdefault(tuple(made), len(self._known)))
                self._events.append((index, start, end, last))
                made.clear()
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
                if self._grad_marks if op == _GRAD_READY else a in self._units:
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
            made.append((account, self._sizes.setdefault(size, len(self._sizes)), times))
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

    def _changes(self, changes: Iterable[Change]) -> _Changes:
        left: Counter[tuple[int, int]] = Counter()
        for account, size, times in changes:
            left[account, size] += times
        moves = [self._moves.setdefault((size, times), len(self._moves)) for _, size, times in changes]
        return _Changes(
            accounts=bytes([account for account, _, _ in changes]),
            pick=picker(moves),
            left=tuple([(account, size, times) for (account, size), times in left.items() if times]),
        )

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
