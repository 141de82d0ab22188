"""The search for the plan to recommend: the fastest that fits, or a simpler one that is as fast (`ranking`).

For each strategy choice the lower bound gives the largest micro-batch that may fit, and the time model the best speed up to it. Then the
choices are estimated completely, the most promising first. For each, the micro-batch is reduced until it fits. The search ends when no
remaining choice can win. Peaks do not fall as the micro-batch grows, and every accumulation of two or more has the same peak. Speeds are
interpolated between a few micro-batches (within 6 %); every result has its exact speed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fsdp_advisor.advice.batches import Batches
from fsdp_advisor.advice.candidate import Candidate, is_round
from fsdp_advisor.advice.curves import interpolate_convex, log_spaced, pareto_front
from fsdp_advisor.advice.evaluator import Evaluator
from fsdp_advisor.advice.ranking import RunnerUp, are_equal, best, choose, may_win
from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.job.compatibility import row_refusal
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.units import format_gib

EVALUATED_CHOICES = 6
"""The least number of choices that are estimated completely if something fits: the most promising ones."""
TIMED_SIZES = 6
"""The number of micro-batches of a choice that are timed. Speeds between them are interpolated."""
FRONTIER_POINTS = 6
"""The largest number of points of the Pareto front."""
USUAL_FRAGMENTATION = 0.12
"""Share of the available memory that fragmentation usually takes. The search for a micro-batch begins at the size that leaves this free."""
_MAX_STEPS = 5
"""The largest number of micro-batches of a choice that are estimated before its smallest one is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A choice whose lower bound fits. `sizes`: the micro-batches that the bound allows; `rates`: the speed at each of them.

    Speeds are tokens per second per GPU, 0 if unknown. `numerics_gain` makes them comparable (`Candidate.numerics_gain`).
    """

    choice: StrategyChoice
    sizes: Sequence[int]
    rates: Sequence[float]
    numerics_gain: float = 1.0

    @property
    def best_rate(self) -> float:
        """The best speed, in equal numerics."""
        return max(self.rates) * self.numerics_gain

    @property
    def order(self) -> tuple[int, float, tuple[int, ...]]:
        """Sort key, the most promising first. Offload comes last, because its speed is the least certain."""
        return (self.choice.host_level, -self.best_rate, self.choice.simplicity_rank)

    def best_index(self, start: int, stop: int) -> int:
        """Index of the fastest micro-batch in `start:stop`. Among those that are about as fast, round ones are preferred, then the
        smallest.

        If speeds are unknown, the largest: it has larger kernels and fewer collectives.
        """
        top = max(self.rates[start:stop])
        if top <= 0:
            return stop - 1
        near = [i for i in range(start, stop) if are_equal(self.rates[i], top)]
        return min(near, key=lambda i: (not is_round(self.sizes[i]), -(self.sizes[i] & -self.sizes[i]), self.sizes[i]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A choice that is not recommended, and why. `candidate` is None if it was not estimated completely."""

    choice: StrategyChoice
    micro_batch_size: int | None
    reason: str
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan that fits (`winner`), the best of other choices that fit (`runners_up`), and the rest."""

    winner: Candidate | None
    runners_up: tuple[RunnerUp, ...]
    rejected: tuple[Rejection, ...]

    @property
    def feasible(self) -> tuple[Candidate, ...]:
        return (*((self.winner,) if self.winner else ()), *(other.candidate for other in self.runners_up))


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search over the choices of one job on one GPU type. `base`: the part that all plans share. `choices`: the simplest first.

    `left_out`: activation choices that are not searched, because their steps would have to be recorded first.
    """

    evaluator: Evaluator
    base: Plan
    batches: Batches
    choices: tuple[StrategyChoice, ...]
    left_out: tuple[ActivationChoice, ...] = ()

    @cached_property
    def activation_choices(self) -> tuple[ActivationChoice, ...]:
        """The activation choices of all choices, the least costly first."""
        return tuple(sorted({choice.activations for choice in self.choices}, key=lambda activations: activations.rank))

    def plan(self, choice: StrategyChoice, micro_batch_size: int) -> Plan:
        return choice.plan(self.base, micro_batch_size, self.batches.accumulation(micro_batch_size))

    def candidate(self, choice: StrategyChoice, micro_batch_size: int) -> Candidate:
        """A choice at a micro-batch, with its estimate."""
        return self.evaluator.candidate(self.plan(choice, micro_batch_size))

    def on(self, evaluator: Evaluator) -> Search:
        """The same search on the evaluator's GPU. If its memory is the host's, choices that use the host are left out."""
        choices = tuple(c for c in self.choices if c.host_level == 0 or not evaluator.gpu.unified_memory)
        return replace(self, evaluator=evaluator, choices=choices)

    def limited_to(self, allowed: Callable[[Plan], bool]) -> Search:
        """The search over allowed plans only. Plans whose memory is unknown remain only if they certainly do not fit."""
        return replace(
            self,
            choices=tuple(
                c
                for c in self.on(self.evaluator).choices
                if allowed(plan := self.plan(c, self.batches.smallest))
                and (self.recording_error(c) is None or self.evaluator.candidate(plan).fits is False)
            ),
        )

    # By the lower bound

    @cached_property
    def max_micro_batches(self) -> dict[StrategyChoice, int]:
        """The largest micro-batch of each choice that the lower bound allows; without the choices that have none."""
        found = {choice: self._max_micro_batch(choice) for choice in self.choices}
        return {choice: size for choice, size in found.items() if size is not None}

    def _max_micro_batch(self, choice: StrategyChoice) -> int | None:
        """The largest micro-batch whose lower bound fits; None if none does.

        Accumulation needs at least as much memory, so sizes that do not fit without it are skipped.
        """
        sizes = self.batches.sizes
        smallest = self.plan(choice, sizes[0])
        if self.host_lacks(smallest) or self.recording_error(choice) is not None:
            return None
        if self.evaluator.model.profile is None:  # only the states are known
            return None if self.evaluator.candidate(smallest).fits is False else sizes[0]
        without_accumulation = choice.plan(self.base, sizes[0])
        if self.evaluator.states_exceed(without_accumulation):
            return None
        once = self.evaluator.max_micro_batch(without_accumulation, sizes)
        if once is None or self.batches.accumulation(once) == 1:
            return once
        return self.evaluator.max_micro_batch(smallest, sizes[: sizes.index(once) + 1])

    def recording_error(self, choice: StrategyChoice) -> AdvisorError | None:
        """Why the choice is refused with its accumulation, or why a tape that it needs cannot be obtained; None if all can. A choice needs
        the tape of its smallest micro-batch and, if that fits, the tape of larger ones.
        """
        if (refused := row_refusal(self.plan(choice, self.batches.smallest))) is not None:
            return refused
        evaluator = self.evaluator
        smallest, *larger = (choice.plan(self.base, size) for size in self.batches.sizes[:2])
        if (error := evaluator.recording_error(smallest)) is not None or evaluator.model.profile is None or not larger:
            return error
        if evaluator.model.recording_allowed and self._exceeds(smallest):
            return None  # nothing is recorded in vain
        error = evaluator.recording_error(larger[0])
        return None if error is None or self._exceeds(smallest) else error

    def host_lacks(self, plan: Plan) -> bool:
        """Whether a node's memory is too small for the plan's steps: the known memory, or the usual one."""
        host = self.evaluator.host_limit_bytes
        return host is not None and self.evaluator.host_bytes(plan) > host

    @property
    def configurations(self) -> int:
        """The number of configurations that the search covers: each choice at each micro-batch up to the first at which nothing fits."""
        sizes = self.batches.sizes
        most = max((sizes.index(size) for size in self.max_micro_batches.values()), default=-1)
        return len(self.choices) * min(most + 2, len(sizes))

    @cached_property
    def prospects(self) -> tuple[Prospect, ...]:
        """The choices that the lower bound allows, the most promising first."""
        evaluator, found = self.evaluator, []
        for choice, largest in self.max_micro_batches.items():
            sizes = self.batches.sizes[: self.batches.sizes.index(largest) + 1]
            rates = self._rates(choice, sizes)
            gain = evaluator.numerics_gain(self.plan(choice, sizes[-1])) if max(rates) else 1.0
            found.append(Prospect(choice=choice, sizes=sizes, rates=rates, numerics_gain=gain))
        return tuple(sorted(found, key=lambda prospect: prospect.order))

    def _rates(self, choice: StrategyChoice, sizes: Sequence[int]) -> list[float]:
        """Tokens per second per GPU at each size, 0 if the time is unknown."""
        seconds, base = self.evaluator.seconds, self.base
        timed = log_spaced(sizes, TIMED_SIZES)
        accumulating = self.batches.accumulation(sizes[0]) > 1
        once = [seconds(choice.plan(base, size, 1)) for size in timed]
        twice = [seconds(choice.plan(base, size, 2)) for size in timed] if accumulating else once
        known = [(one, two - one) for one, two in zip(once, twice, strict=True) if one is not None and two is not None]
        if len(known) < len(timed):
            return [0.0] * len(sizes)
        first = interpolate_convex(timed, [one for one, _ in known], sizes)
        further = interpolate_convex(timed, [more for _, more in known], sizes) if accumulating else first
        rates, tokens = [], replace(base, micro_batch_size=1, gradient_accumulation_steps=1).tokens_per_step
        for size, one, more in zip(sizes, first, further, strict=True):
            steps = self.batches.accumulation(size)
            rates.append(size * steps * tokens / (one + (steps - 1) * more))
        return rates

    # By complete estimates

    @cached_property
    def result(self) -> SearchResult:
        """The plan that `ranking` chooses among those that leave the margin, the runners-up, and the rejected choices."""
        found = self._search(EVALUATED_CHOICES if self.evaluator.model.profile is not None else len(self.choices))
        too_large = (self._too_large_by_lower_bound(c) for c in self.choices if c not in self.max_micro_batches)
        return replace(found, rejected=(*found.rejected, *too_large))

    @cached_property
    def winner(self) -> Candidate | None:
        """The same plan as `result.winner`, with fewer evaluations."""
        return self._search(1).winner

    @cached_property
    def first_fit(self) -> Candidate | None:
        """The most promising choice that fits, at a micro-batch that fits but need not be its fastest; None if none does."""
        found = (self.fastest(prospect, refine=False) for prospect in self.prospects)
        return next((candidate for candidate in found if candidate.fits is not False), None)

    def _search(self, evaluated_choices: int) -> SearchResult:
        """The result of the search. Choices are estimated completely, the most promising first; those that cannot win are estimated only
        up to the number `evaluated_choices`. Choices that the lower bound excludes are not among the rejected ones.
        """
        feasible: list[Candidate] = []
        rejected: list[Rejection] = []
        for i, prospect in enumerate(self.prospects):
            promising = not feasible or may_win(prospect.choice, prospect.best_rate, best(feasible))
            if i >= evaluated_choices and not promising:
                rejected.append(self._not_evaluated(prospect))
                continue
            found = self.fastest(prospect, refine=promising)
            if found.fits is False:
                rejected.append(_too_large(found))
            else:
                feasible.append(found)
        ranking = choose(feasible) if feasible else None
        return SearchResult(
            winner=ranking.winner if ranking else None,
            runners_up=ranking.runners_up if ranking else (),
            rejected=tuple(rejected),
        )

    def fastest(self, prospect: Prospect, *, refine: bool) -> Candidate:
        """A micro-batch of a choice that fits; if none does, the last candidate tried.

        Starts where the lower bound leaves room for usual fragmentation, and steps down until a micro-batch fits. With
        `refine` it then steps up while a larger micro-batch may be faster.
        """
        sizes, choice = prospect.sizes, prospect.choice
        fitting: list[Candidate] = []
        failing, low, high = None, -1, len(sizes)
        at = self._first_guess(prospect)
        for _ in range(_MAX_STEPS):
            found = self.candidate(choice, sizes[at])
            if found.fits is False:
                failing, high = found, at
            else:
                fitting.append(found)
                low = at
            if not fitting and high == 0:
                return self._without_accumulation(prospect, found)
            if not fitting:
                at = prospect.best_index(0, self._scaled(found, sizes[:high]) + 1)
            elif refine and _gains(prospect, low, high):
                at = prospect.best_index(low + 1, self._reach(fitting[-1], failing, sizes[:high]) + 1)
            else:
                break
        return best(fitting) if fitting else self.candidate(choice, sizes[0])

    def _first_guess(self, prospect: Prospect) -> int:
        """Index of the best micro-batch whose lower bound leaves room for usual fragmentation."""
        limit = int((1 - USUAL_FRAGMENTATION) * self.evaluator.available_bytes)
        return prospect.best_index(0, self._index_within(prospect.choice, prospect.sizes, limit) + 1)

    def _scaled(self, failing: Candidate, sizes: Sequence[int]) -> int:
        """Index of the largest of `sizes` that fits if its estimate exceeds its lower bound by the same factor as the estimate of
        `failing` does.
        """
        lower_bound = self.evaluator.lower_bound(failing.plan)
        return self._index_within(failing.choice, sizes, failing.available_bytes * lower_bound // failing.known_bytes)

    def _reach(self, fitting: Candidate, failing: Candidate | None, sizes: Sequence[int]) -> int:
        """Index, above that of `fitting`, up to which estimates are expected to fit; halfway to the end of `sizes` if none is expected to.

        The expectation is the line through `fitting` and `failing`, or else the lower bound plus the bytes by which `fitting` exceeds its
        own.
        """
        low = sizes.index(fitting.plan.micro_batch_size)
        if failing is None:
            beyond = fitting.known_bytes - self.evaluator.lower_bound(fitting.plan)
            reach = self._index_within(fitting.choice, sizes, fitting.available_bytes - beyond)
        else:
            a, b = fitting.plan.micro_batch_size, failing.plan.micro_batch_size
            slope = max(failing.known_bytes - fitting.known_bytes, 1) / (b - a)
            reach = bisect_right(sizes, int(a + (fitting.available_bytes - fitting.known_bytes) / slope)) - 1
        return reach if reach > low else (low + 1 + len(sizes)) // 2

    def _index_within(self, choice: StrategyChoice, sizes: Sequence[int], limit_bytes: int) -> int:
        """Index of the largest of `sizes` whose lower bound is at most the limit; 0 if none is."""
        if len(sizes) == 1:
            return 0
        size = self.evaluator.max_micro_batch(self.plan(choice, sizes[0]), sizes, limit_bytes)
        return 0 if size is None else sizes.index(size)

    def _without_accumulation(self, prospect: Prospect, failing: Candidate) -> Candidate:
        """The candidate with the largest micro-batch if it alone needs no accumulation, which keeps gradients; else the failing one."""
        steps, last = self.batches.accumulation, prospect.sizes[-1]
        if steps(last) == 1 and steps(prospect.sizes[0]) > 1:
            return self.candidate(prospect.choice, last)
        return failing

    def any_fit(self) -> Candidate | None:
        """A plan that leaves the margin, found among those with the smallest lower bound; None if none does."""
        # the largest one may need no accumulation
        sizes = dict.fromkeys((self.batches.smallest, self.batches.preferred))
        recorded = [choice for choice in self.choices if self.recording_error(choice) is None]
        plans = [self.plan(choice, size) for choice in recorded for size in sizes if self.may_fit(choice, size)]
        if self.evaluator.model.profile is not None:
            plans.sort(key=self.evaluator.lower_bound)
        found = map(self.evaluator.candidate, plans)
        return next((candidate for candidate in found if candidate.fits is not False), None)

    def may_fit(self, choice: StrategyChoice, micro_batch_size: int) -> bool:
        """Whether the lower bound leaves the margin; without a tape, whether the states do."""
        plan = self.plan(choice, micro_batch_size)
        if self.host_lacks(plan):
            return False
        if self.evaluator.model.profile is None or self.recording_error(choice) is not None:
            return self.evaluator.candidate(plan).fits is not False
        return not self._exceeds(plan)

    def _exceeds(self, plan: Plan) -> bool:
        """Whether the plan's states alone, or else its lower bound, exceed the memory that the margin leaves. The states are compared
        first, because the lower bound takes ten times longer to compute.
        """
        evaluator = self.evaluator
        states_exceed = evaluator.states_exceed(replace(plan, micro_batch_size=self.batches.smallest))
        return states_exceed or evaluator.lower_bound(plan) > evaluator.available_bytes

    def smallest_footprint(self, micro_batch_size: int | None = None) -> Candidate:
        """The candidate that needs least at this micro-batch (or else the smallest), by its lower bound, or by its states if no choice has
        a tape. Choices for which the host lacks memory come last.
        """
        size = micro_batch_size or self.batches.smallest
        plans = [self.plan(choice, size) for choice in self.choices]
        recorded = [self.plan(c, size) for c in self.choices if self.recording_error(c) is None]
        if self.evaluator.model.profile is None or not recorded:
            by_states = map(self.evaluator.candidate, plans)
            return min(by_states, key=lambda c: (c.host_fits is False, c.known_bytes, c.order))
        within_host = [plan for plan in recorded if not self.host_lacks(plan)] or recorded
        return self.evaluator.candidate(min(within_host, key=self.evaluator.lower_bound))

    def frontier(self) -> tuple[Candidate, ...]:
        """Plans that no other beats in both memory and speed, from the smallest to the fastest. Empty without times."""
        if self.evaluator.model.profile is None:
            return ()
        points = []
        for prospect in self.prospects:
            for size in log_spaced(prospect.sizes, 2 * FRONTIER_POINTS):
                least = self.evaluator.lower_bound(self.plan(prospect.choice, size))
                points.append((least, prospect.rates[prospect.sizes.index(size)], prospect.choice, size))
        points.sort(key=lambda point: (point[0], -point[1], point[2].simplicity_rank, point[3]))
        front = pareto_front(points, lambda point: point[1])
        chosen = [front[i - 1] for i in log_spaced(range(1, len(front) + 1), FRONTIER_POINTS)]
        found = [self.candidate(choice, size) for _, _, choice, size in chosen]
        found = sorted((c for c in found if c.fits), key=lambda c: (c.known_bytes, c.order))
        return tuple(pareto_front(found, lambda c: c.tokens_per_second_per_gpu or 0.0))

    # Why a choice is rejected

    def _not_evaluated(self, prospect: Prospect) -> Rejection:
        if prospect.best_rate > 0:
            reason = f"at most {self.evaluator.speed_text(max(prospect.rates), self.base.seq_len)}, so it was not estimated further"
        else:
            reason = "it is less simple, so it was not estimated further"
        return Rejection(choice=prospect.choice, micro_batch_size=None, reason=reason)

    def _too_large_by_lower_bound(self, choice: StrategyChoice) -> Rejection:
        evaluator, size = self.evaluator, self.batches.smallest
        plan = self.plan(choice, size)
        if self.host_lacks(plan):
            needed, usually = evaluator.host_bytes(plan), "" if evaluator.host_memory_bytes else "usually "
            limit = format_gib(evaluator.host_limit_bytes or 0)
            reason = f"needs {format_gib(needed)} of host memory per node, which {usually}has {limit}"
        elif evaluator.model.profile is None or self.recording_error(choice) is not None:
            states = evaluator.estimate(plan).kept_bytes
            reason = (
                f"its states alone need {format_gib(states)}, and {format_gib(evaluator.available_bytes)} are available"
            )
        else:
            least, has = evaluator.lower_bound(plan), evaluator.available_bytes
            reason = (
                f"its tensors alone need {format_gib(least)} at micro-batch {size}, and {format_gib(has)} are available"
            )
        return Rejection(choice=choice, micro_batch_size=size, reason=reason)


def _gains(prospect: Prospect, low: int, high: int) -> bool:
    """Whether a micro-batch between `low` and `high` may be faster than the one at `low`."""
    between = prospect.rates[low + 1 : high]
    if prospect.best_rate == 0:  # unknown speeds: a larger one is better, if by more than a tenth
        return len(between) > high // 10
    return bool(between) and max(between) > prospect.rates[low] and not are_equal(prospect.rates[low], max(between))


def _too_large(candidate: Candidate) -> Rejection:
    size = candidate.plan.micro_batch_size
    reason = f"{candidate.memory_text} (micro-batch {size})"
    return Rejection(choice=candidate.choice, micro_batch_size=size, reason=reason, candidate=candidate)
