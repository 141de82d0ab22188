"""The largest size, such as the length of the sequence, at which a choice of strategy fits."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.curves import PeakVsSize
from fsdp_advisor.advice.search import USUAL_FRAGMENTATION, Search
from fsdp_advisor.advice.search_space import StrategyChoice
from fsdp_advisor.job.plan import Plan

SEARCH_RESOLUTION = 0.02
"""The relative precision to which the largest size that fits is found. More makes no sense, because reserved memory grows unevenly."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The plan with the largest size that fits, and the last plan of each choice that was evaluated."""

    winner: Candidate | None
    rows: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The quantity that `largest` varies, such as the sequence length.

    `sizes`: its values in ascending order. `plan`: the plan of a choice at a size. `lower_bound`: a choice's lower bound of memory,
    by size.
    """

    search: Search
    sizes: Sequence[int]
    plan: Callable[[StrategyChoice, int], Plan]
    lower_bound: Callable[[StrategyChoice], PeakVsSize]

    def after(self, index: int) -> int:
        """Index of the first size that is larger than that at `index` by the factor 1 + SEARCH_RESOLUTION; 0 if `index` is -1."""
        if index < 0:
            return 0
        least = max(self.sizes[index] + 1, int(self.sizes[index] * (1 + SEARCH_RESOLUTION)))
        return bisect_left(self.sizes, least)

    def expected(self, choice: StrategyChoice, beyond_bytes: int, end: int) -> int:
        """Index, below `end`, of the largest size whose lower bound plus `beyond_bytes` fits; -1 if none does."""
        limit = self.search.evaluator.available_bytes - beyond_bytes
        size = self.lower_bound(choice).largest_within(self.sizes[:end], limit) if end > 0 else None
        return -1 if size is None else bisect_left(self.sizes, size)


def largest(sizes: Sizes, bounds: dict[StrategyChoice, int]) -> Largest:
    """The largest size that fits with any choice, to SEARCH_RESOLUTION. `bounds`: by choice, the largest size whose lower bound
    fits.

    Searches the choice with the largest expected size first, and among equal ones the fastest. Every other choice is evaluated only
    at a size that is larger by the resolution than the best so far.
    """
    best: Candidate | None = None
    low = -1
    rows: dict[StrategyChoice, Candidate] = {}
    usual = int(USUAL_FRAGMENTATION * sizes.search.evaluator.available_bytes)
    promised = {c: sizes.expected(c, usual, bisect_right(sizes.sizes, bound)) for c, bound in bounds.items()}
    order = {c: _speed_order(sizes.search, sizes.plan(c, bound)) for c, bound in bounds.items()}
    for choice in sorted(bounds, key=lambda c: (-promised[c], order[c])):
        over = bisect_right(sizes.sizes, bounds[choice])  # index of the smallest size known not to fit
        at = max(promised[choice], 0) if low < 0 else sizes.after(low)
        while at < over:
            found = rows[choice] = sizes.search.evaluator.candidate(sizes.plan(choice, sizes.sizes[at]))
            beyond = found.known_bytes - sizes.lower_bound(choice)(sizes.sizes[at])
            if found.fits:
                best, low = found, at
            else:
                over = at
            expected = sizes.expected(choice, beyond, over)
            if low < 0:
                at = max(expected, 0) if expected < over - 1 else (over - 1) // 2
            else:
                first = sizes.after(low)
                at = min(expected, over - 1) if expected >= first else (first + over) // 2
    if best is not None:
        rows[best.choice] = best
    order_of_rows = sorted(
        rows.values(), key=lambda c: (not c.fits, -c.plan.micro_batch_size * c.plan.seq_len, c.order)
    )
    return Largest(best, tuple(order_of_rows))


def _speed_order(search: Search, plan: Plan) -> tuple[float, tuple[int, ...]]:
    """Sort key of a plan: the faster first, then the simpler."""
    seconds = search.evaluator.seconds(plan)
    rate = plan.micro_batch_size * plan.gradient_accumulation_steps / seconds if seconds else 0.0
    return -rate, StrategyChoice.of(plan).simplicity_rank
