"""What fits by the cheap figures is walked through the caching allocator, and steps down until it fits with fragmentation too.

The cheap figures are a lower bound: what the allocator reserves is a tenth to a half more, and how much no rule tells. So the
best by them is walked, and if it does not fit, a smaller micro-batch of it, until one does: the first guess is where as large
a share unused would just fit, and a guess that was too low is taken back along the line between the two. Then the others are
walked that promise to be faster, the fastest first, until none does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.advice.curve import Curve
from fsdp_advisor.advice.families import Family
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.search import TIE, Search, choose

GUESSES = 2
"""Smaller micro-batches of a family that are tried before its smallest."""
LEANEST = 2
"""Of the leanest families, where only whether anything fits is asked."""
NEAR = 0.02
"""The largest that fits is not looked for nearer than this: what is reserved does not grow evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The best that fits with fragmentation (`winner`; None: nothing that was walked does).

    `attempts` are the plans walked in their order, each under one or two settings of the allocator; `rivals` the best of each
    other family as far as is known, the fastest first; `failed` families of which no micro-batch fits.
    """

    winner: Candidate | None
    attempts: tuple[tuple[Candidate, ...], ...] = ()
    rivals: tuple[Candidate, ...] = ()
    failed: tuple[Candidate, ...] = ()


def settle(search: Search) -> Settled:
    """The fastest that leaves the margin with fragmentation. Of a bare parameter count nothing can be walked: the cheap
    figures' leader."""
    judge = search.judge
    if judge.model.profile is None or not search.leaders:
        return Settled(winner=next(iter(search.leaders), None), rivals=search.leaders[1:])
    open_ = {c.family: c for c in search.leaders}
    attempts: list[tuple[Candidate, ...]] = []
    fitting: dict[Family, Candidate] = {}
    failing: dict[Family, Candidate] = {}
    tries: Counter[Family] = Counter()
    at: Candidate | None = choose(list(open_.values()))
    while at is not None:
        walked = judge.walked(at, judge.allocator.leanest if attempts else judge.allocator.settings)
        if not walked:
            break
        attempts.append(walked)
        family = at.family
        del open_[family]
        if walked[-1].fits:
            fitting[family] = walked[-1]
        else:
            failing[family] = _closest(walked)
            tries[family] += 1
        following = _following(search, fitting.get(family), failing.get(family), tries[family])
        if following is not None:
            open_[family] = following
        if fitting:  # what is faster by the cheap figures
            best = choose(list(fitting.values()))
            at = _fastest(c for c in open_.values() if _better(c, best))
        else:  # the same family, until there is something to compare with
            at = following or _fastest(open_.values())
    if not fitting and open_:  # no walks are left
        judge.allocator.allow(2 * LEANEST)
        lean = anything(search)
        attempts += [(lean,)] if lean is not None else []
        fitting |= {lean.family: lean} if lean is not None and lean.fits else {}
    winner = judge.plainly(choose(list(fitting.values()))) if fitting else None
    rivals = [c for f, c in (open_ | fitting).items() if winner is None or f != winner.family]
    return Settled(
        winner=winner,
        attempts=tuple(attempts),
        rivals=tuple(sorted(rivals, key=lambda c: c.order)),
        failed=tuple(c for f, c in failing.items() if f not in fitting and f not in open_),
    )


def _fastest(open_: Iterable[Candidate]) -> Candidate | None:
    candidates = list(open_)
    return choose(candidates) if candidates else None


def _better(candidate: Candidate, best: Candidate) -> bool:
    """Whether it would be chosen, were it to fit; in a family's next size a speed that is alike gains nothing."""
    own, top = candidate.tokens_per_second_per_gpu, best.tokens_per_second_per_gpu
    if candidate.family == best.family and own and top:
        return own > (1 + TIE) * top
    return choose([best, candidate]) is candidate


def anything(search: Search) -> Candidate | None:
    """Something that leaves the margin with fragmentation; else what came nearest, None where nothing was walked.

    Of what fits by the cheap figures the leanest are walked, under what reserves least.
    """
    judge, size = search.judge, search.batches.smallest
    plans = (f.plan(search.job, size, search.batches.accumulation(size)) for f in reversed(search.families))
    fitting = [plan for plan in plans if judge.fits(plan)]
    if judge.model.profile is None:
        return judge.untimed(fitting[0]) if fitting else None
    lean = sorted(map(judge.untimed, fitting), key=lambda c: c.known_bytes)
    nearest = None
    for candidate in lean[:LEANEST]:
        walked = judge.walked(candidate, judge.allocator.leanest)
        if walked and walked[-1].fits:
            return judge.timed(walked[-1])
        nearest = nearest or (_closest(walked) if walked else None)
    return nearest


def largest(
    search: Search,
    bounds: Mapping[Family, int],
    sizes: Sequence[int],
    at: Callable[[Family, int], Candidate],
    curve: Callable[[Family], Curve],
) -> tuple[Candidate | None, dict[Family, Candidate]]:
    """The largest of `sizes` that fits with fragmentation in any family, nearer than NEAR; and the last walked of each.

    `bounds` are the largest by the cheap figures. Whichever family promises most is walked next, of several the fastest; under
    settings that have not failed at a smaller size of it.
    """
    best: Candidate | None = None
    last: dict[Family, Candidate] = {}
    refused: dict[tuple[Family, str | None], int] = {}
    low = -1
    over = {f: sizes.index(size) + 1 for f, size in bounds.items()}  # the least that does not fit
    promised = {f: position - 1 for f, position in over.items()}
    order = {f: at(f, size).order for f, size in bounds.items()}

    def open_(family: Family) -> bool:
        if over[family] - 1 <= low:
            return False
        near = low >= 0 and family in last and sizes[over[family]] - sizes[low] <= NEAR * sizes[over[family]]
        return not near

    while able := [f for f in bounds if open_(f)]:
        family = min(able, key=lambda f: (-max(promised[f], low + 1), order[f]))
        position = max(promised[family], low + 1)
        settings = [s for s in search.judge.allocator.leanest if refused.get((family, s), position) >= position]
        walked = search.judge.walked(at(family, sizes[position]), settings)
        if not walked:
            break
        refused |= {(family, c.allocator_conf): position for c in walked if not c.fits}
        if walked[-1].fits:
            low, best, last[family] = position, walked[-1], walked[-1]
            promised[family] = (low + over[family]) // 2
            continue
        closest = _closest(walked)
        last.setdefault(family, closest)
        over[family] = position
        wanted = int((1 - NEAR / 2) * curve(family)(sizes[position]) * _share(closest))
        guess = curve(family).largest_within(sizes[:position], wanted)
        promised[family] = sizes.index(guess) if guess is not None else (low + position) // 2
    if best is not None:
        best = last[best.family] = search.judge.plainly(best)
    return best, last


def _closest(walked: Sequence[Candidate]) -> Candidate:
    return min(walked, key=lambda c: c.walked.reserved_bytes if c.walked else 0)


def _share(failing: Candidate) -> float:
    """Of what it needs, the part that would fit if as much of it went unused."""
    assert failing.walked is not None
    return failing.walked.room_bytes / failing.walked.reserved_bytes


def _following(search: Search, fitting: Candidate | None, failing: Candidate | None, tries: int) -> Candidate | None:
    """What to walk next of a family, of which one plan fits or one does not, or both; None: nothing is worth it."""
    if failing is None:
        return None
    return _smaller(search, failing, tries) if fitting is None else _between(search, fitting, failing)


def _between(search: Search, fitting: Candidate, failing: Candidate) -> Candidate | None:
    """The family's best with a micro-batch that may still fit, by a straight line between what is reserved at both."""
    assert fitting.walked is not None
    assert failing.walked is not None
    low, high = fitting.plan.micro_batch_size, failing.plan.micro_batch_size
    between = [size for size in search.batches.sizes[: search.batches.sizes.index(high)] if size > low]
    if not between:
        return None
    slope = max(failing.walked.reserved_bytes - fitting.walked.reserved_bytes, 1) / (high - low)
    reach = low + (fitting.walked.room_bytes - fitting.walked.reserved_bytes) / slope
    size = max((size for size in between if size <= reach), default=between[0])
    found = search.best(fitting.family, size)
    return found if found.plan.micro_batch_size > low else None


def _smaller(search: Search, failing: Candidate, tries: int) -> Candidate | None:
    """The family's best with a smaller micro-batch that may fit; None where there is none smaller."""
    sizes, batches, family = search.batches.sizes, search.batches, failing.family
    below = sizes[: sizes.index(failing.plan.micro_batch_size)]
    if not below:
        return None
    if tries > GUESSES:
        return search.at(family, below[0])
    size = failing.plan.micro_batch_size
    curve = search.judge.bytes.curve(family, search.job, accumulating=batches.accumulation(size) > 1)
    guess = curve.largest_within(below, int(curve(size) * _share(failing)))
    return search.best(family, guess if guess is not None else below[0])
