"""The search space: what a request leaves open, and what backends and frameworks support."""

from __future__ import annotations

from typing import Any

from searches import LLAMA, search_of

from fsdp_advisor.advice.search_space import StrategyChoice, base_plan, search_space
from fsdp_advisor.job.compatibility import OFFLOADS
from fsdp_advisor.job.search_request import RecommendRequest


def choices_of(*, nnodes: int = 1, **options: Any) -> tuple[StrategyChoice, ...]:
    return search_space(
        RecommendRequest(model=LLAMA, gpus=8 * nnodes, nnodes=nnodes, **options), gpus=8 * nnodes, nnodes=nnodes
    )


def test_fixed_options_leave_one_choice() -> None:
    found = choices_of(strategy="zero3", backend="fsdp2", activation_checkpointing="full", offload="none")
    assert [choice.label for choice in found] == ["ZeRO-3 (fsdp2), checkpointing"]


def test_choices_are_supported_by_their_backend() -> None:
    found = choices_of(nnodes=2, host_memory=64 * 2**30)
    assert all(c.backend in OFFLOADS[c.offload][c.strategy] for c in found)
    assert {c.strategy for c in found} == {"ddp", "zero1", "zero2", "zero3", "hsdp"}
    assert {c.offload_device for c in found} == {"cpu"}
    to_nvme = choices_of(nnodes=2, offload_device="nvme")
    assert {c.backend for c in to_nvme if c.offload_device == "nvme"} == {"deepspeed"}


def test_hsdp_needs_two_nodes() -> None:
    assert "hsdp" not in {c.strategy for c in choices_of()}
    assert "hsdp" in {c.strategy for c in choices_of(nnodes=2)}


def test_fsdp1_is_searched_only_if_named() -> None:
    assert "fsdp1" not in {c.backend for c in choices_of(nnodes=2)}
    assert {c.backend for c in choices_of(nnodes=2, backend="fsdp1")} == {"fsdp1"}


def test_choices_are_supported_by_the_framework() -> None:
    assert {c.backend for c in choices_of(framework="deepspeed")} == {"deepspeed"}
    assert {c.strategy for c in choices_of(framework="trainer", backend="fsdp1")} == {"zero3"}
    sharded = [c for c in choices_of(framework="accelerate", wrap="none") if c.backend == "fsdp2"]
    assert sharded and {c.activation_checkpointing for c in sharded} == {"none", "selective"}


def test_choices_are_ordered_by_simplicity() -> None:
    found = choices_of(nnodes=2, host_memory=64 * 2**30)
    assert [c.simplicity_rank for c in found] == sorted(c.simplicity_rank for c in found)
    assert found[0].label == "DDP (ddp)"


def test_plans_keep_the_ranks_and_options_of_the_base() -> None:
    request = RecommendRequest(model=LLAMA, gpus=16, nnodes=2, framework="accelerate", wrap="none", optim="sgd")
    base = base_plan(request, gpus=16, nnodes=2, seq_len=512)
    for choice in search_space(request, gpus=16, nnodes=2):
        plan = choice.plan(base, 3, 4)
        assert StrategyChoice.of(plan) == choice
        assert (plan.world_size, plan.nnodes, plan.micro_batch_size, plan.gradient_accumulation_steps) == (16, 2, 3, 4)
        assert (plan.framework, plan.wrap, plan.optim, plan.seq_len) == ("accelerate", "none", "sgd", 512)


def test_disallowed_plans_are_left_out() -> None:
    search = search_of(model=LLAMA, gpus=8, offload="none")
    limited = search.limited_to(lambda plan: plan.backend == "deepspeed")
    assert {c.backend for c in limited.choices} == {"deepspeed"}
