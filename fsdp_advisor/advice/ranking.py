"""Chooses the recommended plan among those that fit: the fastest, or the simplest of those whose speeds the time model cannot tell
apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.search_space import StrategyChoice

SPEED_RESOLUTION = 0.05
"""Speeds that differ by less count as equal: the time model cannot tell them apart.

It is the mean error of the predicted ratio of speeds over 13 pairs of published runs without offload that differ only in strategy, backend
or checkpointing. `tests/timing/test_published.py` computes it.
"""
OFFLOAD_RESOLUTION = 0.5
"""SPEED_RESOLUTION for a plan that offloads against one that does not. Predicted ratios of such published pairs are wrong by 47 to 70
%, because hosts differ in speed. So a plan that offloads is preferred only if its predicted speed is higher by more than this share.
"""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that fits and was not chosen. `why_not` begins with "it"."""

    candidate: Candidate
    why_not: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The plan to recommend, and the other plans that fit, the fastest first."""

    winner: Candidate
    runners_up: tuple[RunnerUp, ...]


def choose(found: Sequence[Candidate]) -> Ranking:
    """Rank plans that fit. Raises ValueError if there are none."""
    winner = best(found)
    return Ranking(winner=winner, runners_up=runners_up(winner, [c for c in found if c is not winner]))


def best(found: Sequence[Candidate]) -> Candidate:
    """The plan to recommend. Plans are compared by their speed in equal numerics (`Candidate.comparable_speed`)."""
    pool = _with_least_offload(found)
    fastest = max(map(speed, pool))
    return min((c for c in pool if _is_near(speed(c), fastest)), key=lambda c: (c.simplicity, c.order))


def runners_up(winner: Candidate, others: Iterable[Candidate]) -> tuple[RunnerUp, ...]:
    """The other plans that fit, the fastest first, each with the reason why it is not the winner."""
    return tuple(RunnerUp(other, _why_not(other, winner)) for other in sorted(others, key=lambda c: c.order))


def faster(winner: Candidate, others: Iterable[RunnerUp]) -> RunnerUp | None:
    """The fastest of the runners-up that are faster than the winner in their own numerics; None if there is none."""
    fast = (other for other in others if actual_speed(other.candidate) > actual_speed(winner))
    return max(fast, key=lambda other: actual_speed(other.candidate), default=None)


def speed(candidate: Candidate) -> float:
    """Tokens per second per GPU in equal numerics; 0 if unknown."""
    return candidate.comparable_speed or 0.0


def actual_speed(candidate: Candidate) -> float:
    """Tokens per second per GPU in the candidate's own numerics; 0 if unknown."""
    return candidate.tokens_per_second_per_gpu or 0.0


def may_win(choice: StrategyChoice, best_rate: float, best: Candidate) -> bool:
    """Whether `choose` could prefer a choice to `best` if it fitted at `best_rate`, its best speed (in equal numerics)."""
    own = speed(best)
    if own == 0:
        return False  # without speeds, the first that fits is the simplest
    if choice.host_level != best.choice.host_level:
        return choice.host_level < best.choice.host_level or best_rate > (1 + OFFLOAD_RESOLUTION) * own
    simpler = choice.simplicity_rank < best.choice.simplicity_rank
    return best_rate >= (1 - SPEED_RESOLUTION if simpler else 1 + SPEED_RESOLUTION) * own


def are_equal(one: float, other: float) -> bool:
    """Whether the time model cannot tell two speeds apart."""
    return _is_near(min(one, other), max(one, other))


def next_simpler(
    winner: StrategyChoice, choices: Iterable[StrategyChoice], fitting: Sequence[StrategyChoice]
) -> StrategyChoice | None:
    """The choice that is one step simpler than the winner in strategy, backend and offload; None if the winner is the simplest.

    Of several such choices (with different activation choices) the first in `fitting`; if none is, the simplest.
    """

    def kind(choice: StrategyChoice) -> tuple[str, str, str]:
        return choice.strategy, choice.backend, choice.offload

    simpler = [c for c in choices if c.simplicity_rank < winner.simplicity_rank and kind(c) != kind(winner)]
    if not simpler:
        return None
    nearest = kind(max(simpler, key=lambda c: c.simplicity_rank))
    simplest = min((c for c in simpler if kind(c) == nearest), key=lambda c: c.simplicity_rank)
    return next((c for c in fitting if kind(c) == nearest), simplest)


def _why_not(other: Candidate, winner: Candidate) -> str:
    """Why a plan that fits is not the winner."""
    if other.needed_bytes is None:
        return "its states fit too, but it is less simple"
    own, chosen = other.tokens_per_second_per_gpu, winner.tokens_per_second_per_gpu
    if own is None or chosen is None:
        return "it fits, but is less simple" if chosen is None else "it fits, but its time is unknown"
    gain = f"it is {own / chosen - 1:.0%} faster"
    if are_equal(own, chosen) and winner.simplicity <= other.simplicity:
        is_visible = own / chosen - 1 >= 0.005
        return (
            f"{gain}, which is within the model's error, and less simple"
            if is_visible
            else "it is as fast, but less simple"
        )
    if winner.numerics_gain > other.numerics_gain and own > chosen:
        equal = own * other.numerics_gain / (chosen * winner.numerics_gain) - 1
        change = (
            f"{equal:.0%} faster, within the model's error"
            if equal >= 0.005
            else f"{-equal:.0%} slower"
            if equal <= -0.005
            else "as fast"
        )
        return f"{gain} with everything in 16 bits; compared without autocast it is {change}"
    if own > chosen and other.choice.host_level != winner.choice.host_level:
        return f"{gain}, but it offloads, and the speed of hosts differs"
    if own > chosen:
        return f"{gain}, but does not answer what --find asks"
    comparable = own * other.numerics_gain
    if other.numerics_gain > winner.numerics_gain and comparable < chosen:
        return f"it fits, but is {1 - own / chosen:.0%} slower ({1 - comparable / chosen:.0%} without autocast)"
    return f"it fits, but is {1 - own / chosen:.0%} slower"


def _with_least_offload(found: Sequence[Candidate]) -> Sequence[Candidate]:
    """The plans that use the host least. Plans that use it more are added only if one of them is clearly faster."""
    levels = sorted({c.choice.host_level for c in found})
    pool = [c for c in found if c.choice.host_level == levels[0]]
    for level in levels[1:]:
        further = [c for c in found if c.choice.host_level == level]
        if max(map(speed, further)) > (1 + OFFLOAD_RESOLUTION) * max(map(speed, pool)):
            pool += further
    return pool


def _is_near(rate: float, fastest: float) -> bool:
    return rate >= (1 - SPEED_RESOLUTION) * fastest
