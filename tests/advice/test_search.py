"""The search against a look at every configuration."""

from __future__ import annotations

import random
from typing import Any

import pytest
from asked import GPT2, LLAMA, clock, search_of, unknown

from fsdp_advisor.advice.search import TIE, Row, Search, choose
from fsdp_advisor.estimator import tensor_bytes
from fsdp_advisor.job.plan import OFFLOADS

JOBS: dict[str, dict[str, Any]] = {
    "free": {"model": GPT2, "gpus": 2, "gpu": "24GiB", "seq_len": 512},
    "accumulating": {"model": GPT2, "gpus": 4, "gpu": "24GiB", "seq_len": 512, "gradient_accumulation_steps": 3},
    "global batch": {"model": LLAMA, "gpus": 8, "gpu": "H100-80GB", "global_batch_size": 192},
    "two nodes": {"model": LLAMA, "gpus": 16, "nnodes": 2, "gpu": "A100-40GB"},
}


def rate(row: Row, search: Search) -> float:
    plan = row.family.plan(search.job, row.micro_batch_size, row.accumulation)
    return (
        row.micro_batch_size * row.accumulation * search.job.seq_len / clock(search.judge.model, plan, search.judge.gpu)
    )


@pytest.mark.parametrize("name", JOBS)
def test_every_verdict_is_that_of_a_replay(name: str) -> None:
    search = search_of(**JOBS[name])
    rows = list(search.rows(40))
    assert len(rows) == len(search.families) * min(40, len(search.batches.sizes))
    assert len({(r.family, r.micro_batch_size, r.accumulation) for r in rows}) == len(rows)
    for row in random.Random(0).sample(rows, 250 if len(rows) > 250 else len(rows)):
        plan = row.family.plan(search.job, row.micro_batch_size, row.accumulation)
        assert row.fits == (tensor_bytes(search.judge.model, plan) <= search.judge.available_bytes)
        if row.fits:
            assert row.rate == pytest.approx(rate(row, search), rel=1e-9)  # this clock is a straight line


@pytest.mark.parametrize("name", JOBS)
def test_the_leader_is_the_fastest_of_all_that_fit(name: str) -> None:
    search = search_of(**JOBS[name])
    most = max(search.batches.sizes.index(size) for size in search.ceilings.values()) + 1
    top = max(row.rate for row in search.rows(most) if row.micro_batch_size <= search.settled.get(row.family, 0))
    winner = search.leaders[0]
    assert winner.fits
    assert winner.tokens_per_second_per_gpu == pytest.approx(top, rel=2 * TIE)
    assert [c.order for c in search.leaders[1:]] == sorted(c.order for c in search.leaders[1:])


def test_the_order_is_total_and_reproducible() -> None:
    one, other = (list(search_of(**JOBS["free"]).rows(60)) for _ in range(2))
    assert sorted(one, key=lambda r: r.order) == sorted(other, key=lambda r: r.order)
    random.Random(1).shuffle(other)
    assert sorted(one, key=lambda r: r.order) == sorted(other, key=lambda r: r.order)
    fitting = [row.order for row in one if row.fits]
    assert len(set(fitting)) == len(fitting)


def test_without_a_clock_the_simplest_comes_first() -> None:
    search = search_of(unknown, **JOBS["two nodes"])
    simplicity = [c.family.simplicity for c in search.leaders]
    assert simplicity == sorted(simplicity)
    assert search.leaders[0].step_seconds is None


def test_alike_is_decided_by_simplicity() -> None:
    search = search_of(lambda model, plan, gpu: 1.0, **JOBS["two nodes"], micro_batch_size=1)
    winner = choose(search.leaders)
    assert winner.family == min((c.family for c in search.leaders), key=lambda f: f.simplicity)


def test_what_is_held_is_not_searched() -> None:
    search = search_of(model=LLAMA, gpus=8, strategy="zero3", backend="fsdp2", activation_checkpointing="full", offload="none")  # fmt: skip
    assert [f.label for f in search.families] == ["ZeRO-3 (fsdp2), checkpointing"]


def test_families_are_what_the_backends_can_do() -> None:
    search = search_of(model=LLAMA, gpus=16, nnodes=2, host_memory="64GiB")
    assert all(f.backend in OFFLOADS[f.offload][f.strategy] for f in search.families)
    assert {f.strategy for f in search.families} == {"ddp", "zero1", "zero2", "zero3", "hsdp"}
    assert {f.backend for f in search.families if f.offload_device == "nvme"} == {"deepspeed"}
    assert "hsdp" not in {f.strategy for f in search_of(model=LLAMA, gpus=8).families}


def test_fsdp1_is_looked_at_where_it_is_named() -> None:
    assert "fsdp1" not in {f.backend for f in search_of(model=LLAMA, gpus=16, nnodes=2).families}
    assert {f.backend for f in search_of(model=LLAMA, gpus=16, nnodes=2, backend="fsdp1").families} == {"fsdp1"}


def test_families_are_what_the_framework_can_do() -> None:
    search = search_of(model=LLAMA, gpus=8, framework="deepspeed")
    assert {f.backend for f in search.families} == {"deepspeed"}
    search = search_of(model=LLAMA, gpus=8, framework="trainer", backend="fsdp1")
    assert {f.strategy for f in search.families} == {"zero3"}
    search = search_of(model=LLAMA, gpus=8, framework="accelerate", wrap="none")
    sharded = [f for f in search.families if f.backend == "fsdp2"]
    assert sharded and {f.activation_checkpointing for f in sharded} == {"none"}
    plans = [f.plan(search.job, 1) for f in search.families]
    assert {(p.framework, p.wrap) for p in plans} == {("accelerate", "none")}


def test_the_frontier_rises_in_memory_and_speed() -> None:
    points = search_of(**JOBS["free"]).frontier()
    assert len(points) > 3
    assert all(c.fits for c in points)
    speeds = [c.tokens_per_second_per_gpu or 0.0 for c in points]
    assert speeds == sorted(speeds)
    needs = [c.needed_bytes or 0 for c in points]
    assert needs == sorted(needs)


def test_a_limited_host_refuses_offload() -> None:
    open_host, small_host = (search_of(**JOBS["two nodes"], host_memory=size) for size in ("4TiB", "2GiB"))
    assert any(c.plan.offload == "parameters" for c in open_host.leaders)
    assert not any(c.plan.offload == "parameters" and c.plan.offload_device == "cpu" for c in small_host.leaders)
    assert all(c.host_bytes_per_node <= 2 * 2**30 for c in small_host.leaders)
