"""Micro-batches and accumulations of a global batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.advice.batches import batches, divisors
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.search_request import RecommendRequest


def request_of(**options: Any) -> RecommendRequest:
    return RecommendRequest(model="7e9", **options)


@given(n=st.integers(1, 20_000))
def test_divisors_equal_exhaustive_search(n: int) -> None:
    assert divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0)


@given(whole=st.integers(1, 2000), world=st.integers(1, 64))
def test_every_micro_batch_makes_the_global_batch(whole: int, world: int) -> None:
    try:
        choice = batches(request_of(global_batch_size=whole), world=world)
    except UsageError:
        assert whole % world
        return
    assert {b * choice.accumulation(b) * world for b in choice.sizes} == {whole}
    assert list(choice.sizes) == sorted(set(choice.sizes))


def test_free_batches_have_every_size_and_the_given_accumulation() -> None:
    choice = batches(request_of(gradient_accumulation_steps=4), world=8)
    assert (choice.smallest, choice.preferred, choice.sizes[99], choice.accumulation(7)) == (1, 1, 100, 4)


def test_given_sizes_are_fixed() -> None:
    assert list(batches(request_of(micro_batch_size=3), world=8).sizes) == [3]
    kept = batches(request_of(global_batch_size=96, gradient_accumulation_steps=4), world=8)
    assert (list(kept.sizes), kept.accumulation(3)) == ([3], 4)
    both = batches(request_of(global_batch_size=96, micro_batch_size=3), world=8)
    assert (list(both.sizes), both.accumulation(3)) == ([3], 4)


def test_every_batch_has_whole_groups_of_completions() -> None:
    job = {"framework": "trl", "task": "grpo", "num_generations": 8}
    assert list(batches(request_of(**job), world=2).sizes[:3]) == [4, 8, 12]
    assert list(batches(request_of(**job, global_batch_size=16), world=2).sizes) == [1, 2, 4, 8]
    apart = {"global_batch_size": 32, "steps_per_generation": 2}
    assert list(batches(request_of(**job, **apart), world=2).sizes) == [2, 4, 8, 16]
    with pytest.raises(UsageError, match="= 12, not a multiple of --num-generations 8"):
        batches(request_of(**job, global_batch_size=12), world=2)
    with pytest.raises(UsageError, match="3 ranks are not divisible"):
        batches(request_of(**job, use_vllm=True, vllm_tensor_parallel_size=2), world=3)


ERRORS: dict[str, tuple[dict[str, int], str, str]] = {
    "all three": (
        {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "global_batch_size": 128},
        "micro-batch 2 x accumulation 4 x world 8 = 64, not 128",
        "gradient_accumulation_steps 8 makes it 128",
    ),
    "all three, and no accumulation would do": (
        {"micro_batch_size": 3, "gradient_accumulation_steps": 4, "global_batch_size": 128},
        "micro-batch 3 x accumulation 4 x world 8 = 96, not 128",
        "global_batch_size 96, or another micro-batch",
    ),
    "micro-batch": (
        {"micro_batch_size": 3, "global_batch_size": 128},
        "micro-batch 3 x accumulation 5 x world 8 = 120, not 128",
        "global_batch_size must be a multiple of 24: 120 or 144",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 3, "global_batch_size": 100},
        "micro-batch 4 x accumulation 3 x world 8 = 96, not 100",
        "global_batch_size must be a multiple of 24: 96 or 120",
    ),
    "world": (
        {"global_batch_size": 100},
        "micro-batch 1 x accumulation 12 x world 8 = 96, not 100",
        "global_batch_size must be a multiple of 8: 96 or 104",
    ),
    "less than the world": (
        {"global_batch_size": 4},
        "micro-batch 1 x accumulation 1 x world 8 = 8, not 4",
        "global_batch_size must be a multiple of 8: 8",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_shows_both_sides_of_the_equation(name: str) -> None:
    options, message, hint = ERRORS[name]
    with pytest.raises(UsageError) as refused:
        batches(request_of(**options), world=8)
    assert (refused.value.message, refused.value.hint) == (message, hint)
