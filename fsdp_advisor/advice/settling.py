"""What fits by the cheap figures is walked through the caching allocator, and steps down until it fits with fragmentation too.

The cheap figures are a lower bound: what the allocator reserves is a tenth to a half more, and how much no rule tells. So the
best by them is walked; if it does not fit, its next smaller micro-batch takes its place among the others, and the best of
them is walked. A first guess at the smaller one is the micro-batch at which as large a share unused would just fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.advice.curve import Curve
from fsdp_advisor.advice.families import Family
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.search import Search, choose

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
    """The fastest that fits with fragmentation. Of a bare parameter count nothing can be walked: the cheap figures' leader."""
    if search.judge.model.profile is None or not search.leaders:
        return Settled(winner=next(iter(search.leaders), None), rivals=search.leaders[1:])
    open_ = {c.family: c for c in search.leaders}
    failed: dict[Family, Candidate] = {}
    attempts: list[tuple[Candidate, ...]] = []
    tries: Counter[Family] = Counter()
    winner = None
    while open_ and winner is None:
        best = choose(list(open_.values()))
        walked = search.judge.walked(best)
        if not walked:
            break
        attempts.append(walked)
        if walked[-1].fits:
            winner = walked[-1]
            break
        tries[best.family] += 1
        closest = _closest(walked)
        smaller = _smaller(search, closest, tries[best.family])
        if smaller is None:
            failed[best.family] = closest
            del open_[best.family]
        else:
            open_[best.family] = smaller
    if winner is None and open_:  # no walks are left
        search.judge.allocator.allow(2 * LEANEST)
        lean = anything(search)
        attempts += [(lean,)] if lean is not None else []
        winner = lean if lean is not None and lean.fits else None
    rivals = sorted((c for f, c in open_.items() if winner is None or f != winner.family), key=lambda c: c.order)
    return Settled(winner=winner, attempts=tuple(attempts), rivals=tuple(rivals), failed=tuple(failed.values()))


def anything(search: Search) -> Candidate | None:
    """Something that fits with fragmentation; else what came nearest, None where nothing was walked.

    Of what fits by the cheap figures the leanest are walked.
    """
    judge, size = search.judge, search.batches.smallest
    plans = (f.plan(search.job, size, search.batches.accumulation(size)) for f in reversed(search.families))
    fitting = [plan for plan in plans if judge.fits(plan)]
    if judge.model.profile is None:
        return judge.untimed(fitting[0]) if fitting else None
    lean = sorted(map(judge.untimed, fitting), key=lambda c: c.needed_bytes or c.state_bytes)
    nearest = None
    for candidate in lean[:LEANEST]:
        walked = judge.walked(candidate)
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
        settings = [s for s in search.judge.allocator.settings if refused.get((family, s), position) >= position]
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
    return best, last


def _closest(walked: Sequence[Candidate]) -> Candidate:
    return min(walked, key=lambda c: c.walked.reserved_bytes if c.walked else 0)


def _share(failing: Candidate) -> float:
    """Of what it needs, the part that would fit if as much of it went unused."""
    assert failing.walked is not None
    return failing.walked.room_bytes / failing.walked.reserved_bytes


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
