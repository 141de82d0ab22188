"""micro-batch x accumulation x world = global batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.advice.batches import batches, divisors
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.request import RecommendRequest


def asked(**options: Any) -> RecommendRequest:
    return RecommendRequest(model="7e9", **options)


@given(n=st.integers(1, 20_000))
def test_divisors_are_all_there(n: int) -> None:
    assert divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0)


@given(whole=st.integers(1, 2000), world=st.integers(1, 64))
def test_every_choice_makes_the_global_batch(whole: int, world: int) -> None:
    try:
        choice = batches(asked(global_batch_size=whole), world=world)
    except UsageError:
        assert whole % world
        return
    assert {b * choice.accumulation(b) * world for b in choice.sizes} == {whole}
    assert list(choice.sizes) == sorted(set(choice.sizes))


def test_free_batches_are_every_size_with_the_accumulation_asked_for() -> None:
    choice = batches(asked(gradient_accumulation_steps=4), world=8)
    assert (choice.smallest, choice.wanted, choice.sizes[99], choice.accumulation(7)) == (1, 1, 100, 4)


def test_what_is_given_is_held() -> None:
    assert list(batches(asked(micro_batch_size=3), world=8).sizes) == [3]
    held = batches(asked(global_batch_size=96, gradient_accumulation_steps=4), world=8)
    assert (list(held.sizes), held.accumulation(3)) == ([3], 4)
    both = batches(asked(global_batch_size=96, micro_batch_size=3), world=8)
    assert (list(both.sizes), both.accumulation(3)) == ([3], 4)


REFUSALS: dict[str, tuple[dict[str, int], str, str]] = {
    "all three": (
        {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "global_batch_size": 128},
        "micro-batch 2 x accumulation 4 x world 8 = 64, not 128",
        "--gradient-accumulation-steps 8 makes it 128",
    ),
    "all three, and no accumulation would do": (
        {"micro_batch_size": 3, "gradient_accumulation_steps": 4, "global_batch_size": 128},
        "micro-batch 3 x accumulation 4 x world 8 = 96, not 128",
        "--global-batch-size 96, or another micro-batch",
    ),
    "micro-batch": (
        {"micro_batch_size": 3, "global_batch_size": 128},
        "micro-batch 3 x accumulation 5 x world 8 = 120, not 128",
        "--global-batch-size must be a multiple of 24: 120 or 144",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 3, "global_batch_size": 100},
        "micro-batch 4 x accumulation 3 x world 8 = 96, not 100",
        "--global-batch-size must be a multiple of 24: 96 or 120",
    ),
    "world": (
        {"global_batch_size": 100},
        "micro-batch 1 x accumulation 12 x world 8 = 96, not 100",
        "--global-batch-size must be a multiple of 8: 96 or 104",
    ),
    "less than the world": (
        {"global_batch_size": 4},
        "micro-batch 1 x accumulation 1 x world 8 = 8, not 4",
        "--global-batch-size must be a multiple of 8: 8",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_shows_both_sides(name: str) -> None:
    options, message, hint = REFUSALS[name]
    with pytest.raises(UsageError) as refused:
        batches(asked(**options), world=8)
    assert (refused.value.message, refused.value.hint) == (message, hint)
