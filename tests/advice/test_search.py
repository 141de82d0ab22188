"""The search against an exhaustive one."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import in_turn
from searches import GPT2, LLAMA, clock, no_clock, search_of

from fsdp_advisor.advice import evaluator
from fsdp_advisor.advice.ranking import SPEED_RESOLUTION, choose
from fsdp_advisor.advice.search import EVALUATED_CHOICES
from fsdp_advisor.engines.registry import model_refusal
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.step_figures import allocator_result, tensor_bytes

JOBS: dict[str, dict[str, Any]] = {
    "free batch": {"model": GPT2, "gpus": 2, "gpu": "24GiB", "seq_len": 512, "offload": "none"},
    "accumulation": {
        "model": GPT2, "gpus": 4, "gpu": "24GiB", "seq_len": 512, "gradient_accumulation_steps": 3, "offload": "none",
    },
    "global batch": {"model": GPT2, "gpus": 8, "gpu": "24GiB", "global_batch_size": 192, "offload": "none"},
}  # fmt: skip


@in_turn(0, of=3)
@pytest.mark.parametrize("name", JOBS)
def test_max_micro_batch_is_the_last_whose_lower_bound_fits(name: str) -> None:
    search = search_of(**JOBS[name])
    sizes = search.batches.sizes
    for choice, largest in search.max_micro_batches.items():
        following = sizes[sizes.index(largest) + 1 :][:1]
        assert search.may_fit(choice, largest)
        assert not any(search.may_fit(choice, size) for size in following)


@in_turn(0, of=2)
def test_lower_bound_is_at_least_the_tensors_and_at_most_the_estimate() -> None:
    search = search_of(**JOBS["free batch"])
    for choice in search.choices:
        plan = search.plan(choice, 2)
        lower = search.evaluator.lower_bound(plan)
        needed = search.candidate(choice, 2).needed_bytes
        assert needed is not None
        assert tensor_bytes(search.evaluator.model, plan, search.evaluator.gpu) <= lower <= needed


@in_turn(0, of=2)
@pytest.mark.parametrize("model", [LLAMA, "google/gemma-3-4b-it", "mistralai/Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("gpus", [1, 8])
def test_lower_bound_exceeds_memory_that_the_states_alone_exceed(model: str, gpus: int) -> None:
    search = search_of(model=model, gpus=gpus, gpu="24GiB", seq_len=128, global_batch_size=16)
    large = [choice for choice in search.choices if search.evaluator.states_exceed(search.plan(choice, 1))]
    assert large
    bounds = [search.evaluator.lower_bound(search.plan(choice, 1)) for choice in large]
    assert min(bounds) > search.evaluator.available_bytes


def test_no_step_is_built_for_plans_whose_states_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object) -> int:
        raise AssertionError("a step was built")

    monkeypatch.setattr(evaluator, "tensor_bytes", built)
    assert search_of(model=LLAMA, gpus=2, gpu="24GiB", offload="none").any_fit() is None


def test_a_plan_is_checked_once_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, Plan]] = []

    def checks(profile: Profile, plan: Plan) -> UsageError | None:
        checked.append((id(profile), plan))
        return model_refusal(profile, plan)

    monkeypatch.setattr(evaluator, "model_refusal", checks)
    search = search_of(model=LLAMA, gpus=2, gpu="24GiB", offload="none")
    assert search.any_fit() is None
    search.smallest_footprint()
    assert checked
    assert len(checked) == len(set(checked))


def test_lower_bound_is_that_of_the_gpus_attention_kernel() -> None:
    """sdpa runs cuDNN's kernel on an H100, and the memory-efficient one on an A100, for queries of Phi-3's layout and a filled window."""
    job = {
        "model": "microsoft/Phi-3-mini-4k-instruct",
        "gpus": 8,
        "seq_len": 8192,
        "strategy": "zero3",
        "backend": "fsdp2",
    }
    for gpu in ("A100-80GB", "H100-80GB"):
        search = search_of(**job, gpu=gpu, activation_checkpointing="none", offload="none")
        (choice,) = search.choices
        plan = search.plan(choice, 2)
        assert (
            tensor_bytes(search.evaluator.model, plan, search.evaluator.gpu)
            == search.candidate(choice, 2).estimate.peak_tensor_bytes
        )


@in_turn(2, of=3)
@pytest.mark.parametrize("name", JOBS)
def test_no_feasible_plan_is_clearly_faster_than_the_winner(name: str) -> None:
    search = search_of(**JOBS[name])
    winner = search.result.winner
    assert winner is not None and winner.fits and winner.tokens_per_second_per_gpu is not None
    for choice, largest in search.max_micro_batches.items():
        for size in (size for size in search.batches.sizes if size <= largest):
            plan = search.plan(choice, size)
            rate = (
                size
                * plan.gradient_accumulation_steps
                * plan.seq_len
                / clock(search.evaluator.model, plan, search.evaluator.gpu)
            )
            if rate > (1 + 2 * SPEED_RESOLUTION) * winner.tokens_per_second_per_gpu:
                assert not search.candidate(choice, size).fits


@pytest.mark.parametrize("name", JOBS)
def test_runners_up_fit_and_are_ordered(name: str) -> None:
    result = search_of(**JOBS[name]).result
    assert all(other.candidate.fits for other in result.runners_up)
    assert (orders := [other.candidate.order for other in result.runners_up]) == sorted(orders)
    assert result.winner not in [other.candidate for other in result.runners_up]


@pytest.mark.parametrize("name", JOBS)
def test_every_choice_is_feasible_or_rejected_with_a_reason(name: str) -> None:
    search = search_of(**JOBS[name])
    feasible = [c.choice for c in search.result.feasible]
    rejected = [rejection.choice for rejection in search.result.rejected]
    assert sorted((*feasible, *rejected), key=lambda c: c.simplicity_rank) == list(search.choices)
    assert all(rejection.reason for rejection in search.result.rejected)
    assert all(r.candidate.fits is False for r in search.result.rejected if r.candidate is not None)


@in_turn(0, of=2)
def test_the_result_does_not_depend_on_earlier_evaluations() -> None:
    fresh, used = search_of(**JOBS["free batch"]), search_of(**JOBS["free batch"])
    for choice in reversed(used.choices):
        used.candidate(choice, 4)
    used.frontier()
    assert used.result == fresh.result


def test_a_quick_search_finds_the_same_winner() -> None:
    assert search_of(**JOBS["free batch"]).winner == search_of(**JOBS["free batch"]).result.winner


def test_without_times_the_simplest_choice_wins() -> None:
    search = search_of(no_clock, **JOBS["free batch"])
    ranks = [c.choice.simplicity_rank for c in search.result.feasible]
    assert ranks == sorted(ranks)
    assert len(ranks) <= EVALUATED_CHOICES
    assert search.result.winner is not None and search.result.winner.step_seconds is None


def test_of_equal_speeds_the_simplest_wins() -> None:
    search = search_of(lambda model, plan, gpu: 1.0, **JOBS["free batch"], micro_batch_size=1)
    winner = choose(search.result.feasible).winner
    assert winner.choice == min((c.choice for c in search.result.feasible), key=lambda c: c.simplicity_rank)


def test_frontier_rises_in_memory_and_speed() -> None:
    points = search_of(**JOBS["free batch"]).frontier()
    assert len(points) > 1
    assert all(c.fits for c in points)
    speeds, needs = ([getattr(c, name) for c in points] for name in ("tokens_per_second_per_gpu", "needed_bytes"))
    assert speeds == sorted(speeds)
    assert needs == sorted(needs)


def test_limited_host_memory_rules_offload_out() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "24GiB", "strategy": "zero3", "backend": "fsdp2"}
    large, small = (search_of(**job, host_memory=size).result for size in ("4TiB", "100GiB"))
    assert any(c.plan.offload == "parameters" for c in large.feasible)
    assert not any(c.plan.offload == "parameters" for c in small.feasible)
    assert any("of host memory per node, which has 100.00 GiB" in rejection.reason for rejection in small.rejected)


def test_expandable_segments_are_used_only_if_fragmentation_decides() -> None:
    search = search_of(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0", gpus=4, gpu="25GiB", offload="none")
    by_label = {choice.label: choice for choice in search.choices}
    helped = search.candidate(by_label["ZeRO-2 (deepspeed), checkpointing"], 14)
    plain = search.candidate(by_label["ZeRO-3 (fsdp2)"], 1)
    without = search.evaluator.estimate(helped.plan).needed_bytes
    assert without is not None and without > helped.available_bytes
    assert helped.fits and helped.environment == {"PYTORCH_ALLOC_CONF": EXPANDABLE_SEGMENTS}
    assert plain.fits and plain.environment == {}


def test_expandable_segments_are_simulated_once() -> None:
    """For the row without them, which says whether they help, and for the candidate with them."""
    search = search_of(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0", gpus=4, gpu="25GiB", offload="none")
    (choice,) = (choice for choice in search.choices if choice.label == "ZeRO-2 (deepspeed), checkpointing")
    allocator_result.cache_clear()
    assert search.candidate(choice, 15).environment
    runs = allocator_result.cache_info()
    assert (runs.misses, runs.hits) == (2, 1)


@in_turn(1, of=2)
@pytest.mark.parametrize("tokens", [4096, 9216])
def test_expandable_segments_are_used_if_only_their_cache_can_shrink_to_the_margin(tokens: int) -> None:
    """At 4096 tokens the steps also run on the whole GPU without the setting, but not in the memory that the margin leaves."""
    search = search_of(
        model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        gpus=8,
        gpu="H100-80GB",
        strategy="zero3",
        backend="fsdp2",
        seq_len=tokens,
        activation_checkpointing="full",
        offload="none",
    )
    (choice,) = search.choices
    found = search.candidate(choice, 1)
    assert search.evaluator.estimate(found.plan).fits is (tokens == 4096)
    assert found.known_bytes > found.available_bytes and found.runs_in_available and found.fits
    assert found.environment == {"PYTORCH_ALLOC_CONF": EXPANDABLE_SEGMENTS}


def test_smallest_footprint_does_not_fit_if_nothing_does() -> None:
    search = search_of(model=LLAMA, gpus=1, gpu="24GiB", offload="none")
    smallest = search.smallest_footprint()
    assert search.result.winner is None and search.any_fit() is None
    assert smallest.fits is False
    others = [search.evaluator.lower_bound(search.plan(choice, 1)) for choice in search.choices]
    assert search.evaluator.lower_bound(smallest.plan) == min(others)
