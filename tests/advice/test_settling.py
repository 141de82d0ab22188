"""What the allocator settles: that what is recommended fits with fragmentation, how far it steps down, and at what cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asked import GPT2, LLAMA, advise, search_of

from fsdp_advisor.advice import fragmentation, recommend
from fsdp_advisor.advice.fragmentation import EXPANDABLE_SEGMENTS, MOST_WALKS, Fragmentation
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.search import TIE, Search
from fsdp_advisor.advice.settling import LEANEST, NEAR, largest, settle
from fsdp_advisor.advice.tree import FRAGMENTATION
from fsdp_advisor.estimator import estimate, estimate_plan, tensor_bytes
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.model.resolve import Resolved, resolve

JOBS: dict[str, dict[str, Any]] = {
    "ddp fits": {"model": GPT2, "gpus": 2, "gpu": "24GiB"},
    "steps down": {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"},
    "expandable segments": {"model": LLAMA, "gpus": 8, "gpu": "H100"},
    "another family": {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "H100"},
    "fsdp1": {"model": LLAMA, "gpus": 8, "gpu": "H100", "backend": "fsdp1"},
    "accelerate": {"model": LLAMA, "gpus": 8, "gpu": "H100", "framework": "accelerate"},
    "largest batch": {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB", "find": "batch"},
    "fewest gpus": {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", "find": "gpus"},
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_recommended_fits_with_fragmentation(name: str) -> None:
    recommendation = advise(**JOBS[name])
    winner = recommendation.winner
    assert winner is not None and winner.walked is not None and winner.fits
    conf = AllocatorConf.parse(winner.allocator_conf) if winner.allocator_conf else None
    model, gpu = resolve(JOBS[name]["model"]), find_gpu(winner.gpu)
    row = estimate_plan(model, winner.plan, gpu, walk="always", conf=conf)
    assert row.reserved is not None
    assert row.reserved.verdict == "fits"
    assert (row.peak_reserved_bytes, row.peak_device_bytes) == (
        winner.walked.reserved_bytes,
        winner.walked.device_bytes,
    )
    assert winner.walked.device_bytes <= recommendation.available_bytes < gpu.memory_bytes
    document = recommendation.as_dict()
    assert document["peak_reserved_bytes"] == document["estimate"]["peak_reserved_bytes"] == row.peak_reserved_bytes
    assert document["peak_device_bytes"] == document["estimate"]["peak_device_bytes"] == row.peak_device_bytes


@pytest.mark.parametrize("find", [None, "batch", "sequence"])
def test_the_margin_is_left_free_with_fragmentation(find: str | None) -> None:
    """The less may be taken, the smaller the plan, also where the tensors alone would leave the margin."""
    found = [advise(**JOBS["steps down"], margin=margin, find=find, strategy="zero3", offload="none") for margin in (0, 0.08, 0.2)]  # fmt: skip
    for recommendation in found:
        assert recommendation.winner is not None and recommendation.winner.walked is not None
        assert recommendation.winner.walked.device_bytes <= recommendation.available_bytes
        last = recommendation.tree.path[-1]
        assert last.id in FRAGMENTATION
        assert last.available_bytes == recommendation.available_bytes
    tokens = [r.winner.plan.micro_batch_size * r.winner.plan.seq_len for r in found if r.winner is not None]
    assert tokens[0] > tokens[1] > tokens[2] or find == "sequence"  # 4096 tokens are the model's own maximum


@pytest.mark.parametrize("name", ["ddp fits", "steps down", "expandable segments"])
def test_nothing_that_fits_is_faster(name: str) -> None:
    """By a walk of every plan that would be, by more than what counts as alike."""
    search = search_of(**JOBS[name], offload="none")
    winner = settle(search).winner
    assert winner is not None and winner.tokens_per_second_per_gpu is not None
    search.judge.allocator.allow(10_000)
    top = (1 + TIE) * winner.tokens_per_second_per_gpu
    for family, ceiling in search.settled.items():
        for size in search.batches.sizes[: search.batches.sizes.index(ceiling) + 1]:
            rival = search.at(family, size)
            if (rival.tokens_per_second_per_gpu or 0.0) > (1 + TIE) * top:
                assert not search.judge.walked(rival)[-1].fits


def test_expandable_segments_are_set_only_where_they_are_needed() -> None:
    plain, helped = advise(model=GPT2, gpus=2, gpu="H100"), advise(**JOBS["expandable segments"])
    assert plain.as_dict()["environment"] == {}
    assert "--allocator-conf" not in plain.options
    assert helped.winner is not None
    assert helped.as_dict()["environment"] == {"PYTORCH_ALLOC_CONF": EXPANDABLE_SEGMENTS}
    assert helped.options[-2:] == ("--allocator-conf", EXPANDABLE_SEGMENTS)
    without = estimate_plan(resolve(LLAMA), helped.winner.plan, find_gpu("H100"), walk="always")
    assert without.peak_device_bytes is not None
    assert without.peak_device_bytes > helped.available_bytes


def test_settings_that_are_given_are_held() -> None:
    conf = "max_split_size_mb:256"
    recommendation = advise(model=LLAMA, gpus=8, gpu="H100", allocator_conf=conf)
    assert recommendation.winner is not None
    assert recommendation.winner.environment == {"PYTORCH_ALLOC_CONF": conf}
    assert {c.allocator_conf for c in recommendation.refused if c.walked} <= {conf}


# With a made-up allocator: `waste` of the tensors under PyTorch's own settings, `less` with expandable segments

Walk = tuple[Plan, str | None]
BESIDE = 2**30


@pytest.fixture
def wasting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Walk]]:
    def install(waste: Callable[[Plan], float], less: float = 1.0) -> list[Walk]:
        walks: list[Walk] = []

        def walk(model: Resolved, plan: Plan, gpu: Gpu, available_bytes: int, conf: str | None) -> Fragmentation:
            walks.append((plan, conf))
            reserved = int(tensor_bytes(model, plan) * (1 + waste(plan) * (less if conf else 1)))
            return Fragmentation(
                allocator_conf=conf,
                reserved_bytes=reserved,
                beside_bytes=BESIDE,
                available_bytes=available_bytes,
                fits=reserved + BESIDE <= available_bytes,
            )

        monkeypatch.setattr(fragmentation, "_walk", walk)
        return walks

    return install


def test_nothing_is_walked_twice_and_the_first_that_fits_is_taken(wasting: Callable[..., list[Walk]]) -> None:
    walks = wasting(lambda plan: 0.0)
    settled = settle(search := search_of(**JOBS["steps down"]))
    assert settled.winner is not None
    assert settled.winner.plan == search.leaders[0].plan
    assert walks == [(settled.winner.plan, None)]


def _fitting(search: Search, reserved_bytes: Callable[[Plan], float]) -> list[Candidate]:
    """All that fits if so much is reserved."""
    room = search.judge.available_bytes - BESIDE
    return [
        found
        for family, ceiling in search.settled.items()
        for size in range(1, ceiling + 1)
        if reserved_bytes((found := search.at(family, size)).plan) <= room
    ]


def test_it_steps_down_to_what_fits_and_is_fastest(wasting: Callable[..., list[Walk]]) -> None:
    walks = wasting(lambda plan: 0.3)
    search = search_of(**JOBS["steps down"])
    settled = settle(search)
    assert settled.winner is not None
    assert len(walks) == len(set(walks)) <= MOST_WALKS
    fitting = _fitting(search, lambda plan: 1.3 * tensor_bytes(search.judge.model, plan))
    top = max(c.tokens_per_second_per_gpu or 0.0 for c in fitting)
    assert (settled.winner.tokens_per_second_per_gpu or 0.0) >= 0.97 * top


def test_a_step_too_far_down_is_taken_back(wasting: Callable[..., list[Walk]]) -> None:
    """States may lie close, and all that goes unused be among what grows with the batch."""
    search = search_of(
        lambda model, plan, gpu: 1.0,  # the larger, the faster
        **JOBS["steps down"], offload="none", strategy="zero3", backend="fsdp2", activation_checkpointing="full",
    )  # fmt: skip

    def needs(plan: Plan) -> int:
        return tensor_bytes(search.judge.model, plan)

    alone = needs(search.at(search.families[0], 1).plan)
    walks = wasting(lambda plan: 1.5 * (needs(plan) - alone) / needs(plan))
    settled = settle(search)
    assert settled.winner is not None
    assert len(walks) == len(set(walks)) <= MOST_WALKS
    fitting = _fitting(search, lambda plan: 2.5 * needs(plan) - 1.5 * alone)
    top = max(c.tokens_per_second_per_gpu or 0.0 for c in fitting)
    assert (settled.winner.tokens_per_second_per_gpu or 0.0) >= (1 - 2 * TIE) * top


def test_another_family_takes_over(wasting: Callable[..., list[Walk]]) -> None:
    search = search_of(**JOBS["steps down"])
    best = search.leaders[0].family
    wasting(lambda plan: 9.0 if plan.strategy == best.strategy and plan.offload == best.offload else 0.0)
    settled = settle(search)
    assert settled.winner is not None
    assert (settled.winner.plan.strategy, settled.winner.plan.offload) != (best.strategy, best.offload)
    assert all(c.fits is False for c in settled.failed)


def test_the_work_is_bounded_and_nothing_is_promised(wasting: Callable[..., list[Walk]]) -> None:
    walks = wasting(lambda plan: 1e6)
    recommendation = advise(**JOBS["steps down"])
    assert recommendation.winner is None
    assert recommendation.fits is False
    assert recommendation.remedies == ()
    assert len(walks) <= 2 * MOST_WALKS + 2 * LEANEST + MOST_WALKS // 2
    assert all(row["because"] for row in recommendation.as_dict()["rejected"])
    ids = [node.id for node in recommendation.tree.path]
    assert ids[-4:] == ["fragmentation", "expandable_segments", "next", "more_gpus"]
    json_document = recommendation.as_dict()
    assert json_document["peak_reserved_bytes"] is json_document["peak_device_bytes"] is None


def test_where_walks_run_out_the_leanest_are_asked(wasting: Callable[..., list[Walk]]) -> None:
    walks = wasting(lambda plan: 0.0 if plan.offload == "parameters" else 9.0)
    settled = settle(search_of(**JOBS["steps down"]))
    assert settled.winner is not None
    assert settled.winner.plan.offload == "parameters"
    assert len(walks) <= MOST_WALKS + 2 * LEANEST


@pytest.mark.parametrize("waste", [0.02, 0.25, 0.6])
def test_the_largest_is_found_without_a_look_at_each(waste: float, wasting: Callable[..., list[Walk]]) -> None:
    walks = wasting(lambda plan: waste, less=0.5)
    search = search_of(model=GPT2, gpus=4, gpu="A100-40GB", seq_len=256, offload="none")
    bounds = search.settled
    found, last = largest(
        search, bounds, search.batches.sizes, search.at,
        lambda f: search.judge.bytes.curve(f, search.job, accumulating=False),
    )  # fmt: skip
    assert found is not None
    room = search.judge.available_bytes - BESIDE

    def fits(family: Any, size: int) -> bool:
        return (1 + waste / 2) * tensor_bytes(search.judge.model, search.at(family, size).plan) <= room

    best = max(size for f, bound in bounds.items() for size in range(1, bound + 1) if fits(f, size))
    assert best * (1 - NEAR) - 1 <= found.plan.micro_batch_size <= best
    assert last[found.family] is found
    assert len(walks) <= MOST_WALKS


def test_a_bare_count_has_nothing_to_walk() -> None:
    recommendation = advise(model="7e9", gpus=4, gpu="H100")
    assert recommendation.winner is not None
    assert recommendation.winner.walked is None
    assert recommendation.fits is None


def test_the_estimates_of_all_strategies_are_not_walked() -> None:
    """They stand beside a recommendation as `estimate()` gives them: walking all would take longer than advising."""
    plain = estimate(**JOBS["steps down"]).as_dict()["estimates"]
    assert recommend(**JOBS["steps down"]).as_dict()["estimates"] == plain
