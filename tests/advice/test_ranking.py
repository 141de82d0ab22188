"""Which plan is recommended of those that fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from matrix import in_turn
from searches import LLAMA, advise, search_of

from fsdp_advisor import estimate
from fsdp_advisor.advice.candidate import Candidate, is_round
from fsdp_advisor.advice.ranking import OFFLOAD_RESOLUTION, SPEED_RESOLUTION, choose, faster, may_win, next_simpler
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.resolved import Resolved

GPT2 = "openai-community/gpt2"
Seconds = Callable[[Plan], float]
LABELS = ("DDP (ddp)", "ZeRO-2 (fsdp2)", "ZeRO-3 (fsdp2)", "ZeRO-1 (deepspeed)", "ZeRO-3 (deepspeed)")


def candidates(seconds: Seconds, **options: object) -> dict[str, Candidate]:
    """One candidate per choice without checkpointing, at micro-batch 2, by label."""

    def timer(model: Resolved, plan: Plan, gpu: Gpu) -> float:
        return seconds(plan)

    search = search_of(timer, model=GPT2, gpus=8, gpu="H100", seq_len=512, **options)
    plain = (c for c in search.choices if c.activation_checkpointing == "none")
    return {c.label: search.candidate(c, 2) for c in plain}


def test_engines_are_preferred_from_ddp_to_deepspeed() -> None:
    found = candidates(lambda plan: 1.0, offload="none")
    for n, label in enumerate(LABELS):
        assert choose([found[other] for other in LABELS[n:]]).winner.label == label


def test_a_faster_plan_wins_only_beyond_the_resolution() -> None:
    for gain, label in ((0.9 * SPEED_RESOLUTION, "ZeRO-2 (fsdp2)"), (1.2 * SPEED_RESOLUTION, "ZeRO-3 (fsdp2)")):
        found = candidates(lambda plan, gain=gain: 1 - gain if plan.strategy == "zero3" else 1.0, offload="none")  # type: ignore[misc]
        assert choose([found["ZeRO-2 (fsdp2)"], found["ZeRO-3 (fsdp2)"]]).winner.label == label


@pytest.mark.parametrize(
    ("speedup", "offloads"), [(1 + 0.8 * OFFLOAD_RESOLUTION, False), (1 + 1.2 * OFFLOAD_RESOLUTION, True)]
)
def test_offload_wins_only_if_it_is_clearly_faster(speedup: float, offloads: bool) -> None:
    found = candidates(lambda plan: 1.0 if plan.offload == "none" else 1 / speedup)
    winner = choose(list(found.values())).winner
    assert (winner.plan.offload != "none") == offloads
    offloaded = next(c for c in found.values() if c.plan.offload != "none")
    assert may_win(offloaded.choice, offloaded.comparable_speed or 0, found["DDP (ddp)"]) == offloads


def test_each_runner_up_has_the_reason_why_it_was_not_chosen() -> None:
    seconds = {"ddp": 1.5, "zero2": 1.0, "zero3": 0.96, "zero1": 1.25}
    found = candidates(lambda plan: seconds[plan.strategy], offload="none", precision="bf16", backend="deepspeed")
    ranking = choose([c for c in found.values() if c.plan.strategy != "ddp"])
    assert ranking.winner.label == "ZeRO-2 (deepspeed)"
    assert {other.candidate.label: other.why_not for other in ranking.runners_up} == {
        "ZeRO-3 (deepspeed)": "it is 4% faster, which is within the model's error, and less simple",
        "ZeRO-1 (deepspeed)": "it fits, but is 20% slower",
    }
    assert faster(ranking.winner, ranking.runners_up) is ranking.runners_up[0]


def test_ddp_is_compared_in_the_numerics_of_the_others() -> None:
    """It is slower than ZeRO-2 on one GPU too, so that the difference is one of autocast and not of the strategy."""
    found = candidates(lambda plan: 1.4 if plan.strategy == "ddp" else 1.0, offload="none")
    assert found["DDP (ddp)"].numerics_gain == pytest.approx(1.4)
    assert found["ZeRO-2 (fsdp2)"].numerics_gain == 1
    assert choose(list(found.values())).winner.label == "DDP (ddp)"


def test_gpt2_on_8_gpus_trains_under_ddp_and_the_note_names_the_numerics() -> None:
    advice = advise(None, model=GPT2, gpus=8, gpu="H100")
    assert advice.winner is not None and advice.winner.plan.strategy == "ddp"
    assert any("autocast" in note and "bf16" in note for note in advice.notes)
    assert advice.why_not_simpler is None
    assert advice.faster is not None
    assert re.fullmatch(
        r"it is \d+% faster with everything in 16 bits; compared without autocast it is "
        r"(\d+% slower|\d% faster, within the model's error|as fast)",
        advice.faster.why_not,
    )


@pytest.mark.parametrize("model", [GPT2, LLAMA, "google-bert/bert-base-uncased"])
def test_micro_batches_are_round_unless_that_costs_speed(model: str) -> None:
    search = search_of(None, model=model, gpus=8, gpu="H100", offload="none")
    winner = search.result.winner
    assert winner is not None
    size = winner.plan.micro_batch_size
    if not is_round(size):
        smaller = max(n for n in range(1, size) if is_round(n))
        seconds = search.evaluator.seconds(search.plan(winner.choice, smaller))
        assert seconds is not None and winner.step_seconds is not None
        interpolated = 0.02  # speeds between the sizes that are timed
        assert smaller / seconds < (1 - SPEED_RESOLUTION + interpolated) * size / winner.step_seconds


def test_the_next_simpler_strategy_and_its_reason_are_named() -> None:
    advice = advise(None, model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100")
    assert advice.winner is not None and advice.winner.label == "ZeRO-2 (fsdp2)"
    assert advice.why_not_simpler is not None
    assert advice.why_not_simpler.startswith("DDP (ddp) was not chosen: its tensors alone need")


def test_next_simpler_is_the_variant_that_fits_and_is_none_for_the_simplest() -> None:
    choices = search_of(model=LLAMA, gpus=8, gpu="H100", offload="none").choices
    by_label = {c.label: c for c in choices}
    winner, plain, checkpointed = (
        by_label[label]
        for label in ("ZeRO-3 (fsdp2), checkpointing", "ZeRO-2 (fsdp2)", "ZeRO-2 (fsdp2), checkpointing")
    )
    assert next_simpler(by_label["DDP (ddp)"], choices, []) is None
    assert next_simpler(winner, choices, []) == plain
    assert next_simpler(winner, choices, [checkpointed]) == checkpointed


def test_one_gpu_needs_no_sharding() -> None:
    choices = search_of(model=GPT2, gpus=1, gpu="H100").choices
    assert {c.strategy for c in choices if c.offload == "none"} == {"ddp"}
    assert {
        c.strategy
        for c in search_of(model=GPT2, gpus=1, gpu="H100", framework="deepspeed").choices
        if c.offload == "none"
    } != set()


def test_more_gpus_are_advised_with_sharding_although_one_gpu_needs_none() -> None:
    advice = advise(None, model="13B", gpus=1, gpu="H100", offload="none")
    assert {"gpus": 3, "nnodes": 1} in [dict(remedy.options) for remedy in advice.remedies]


@in_turn(0, of=2)
def test_a_plan_that_only_caches_too_much_leaves_the_margin() -> None:
    """32 billion parameters at 16,000 tokens on 16 GPUs fit without offload: the allocator can give its cache back."""
    advice = advise(None, model="Qwen/Qwen3-32B", gpus=16, nnodes=2, gpu="A100-80GB", seq_len=16000)
    assert advice.winner is not None and advice.winner.fits
    assert advice.winner.label == "ZeRO-3 (fsdp2), checkpointing"
    assert advice.winner.runs_in_available and advice.winner.known_bytes > advice.winner.available_bytes
    assert "are enough with less cache" in advice.winner.memory_text


def test_a_search_judges_the_host_memory_as_an_estimate_does() -> None:
    """The margin is of the GPU's memory only."""
    job: dict[str, Any] = {
        "model": GPT2,
        "gpus": 2,
        "gpu": "24GiB",
        "strategy": "zero3",
        "backend": "deepspeed",
        "offload": "parameters",
    }
    [row] = estimate(**job).estimates
    assert row.job_peaks is not None
    least = max(phase.host_bytes_per_node or 0 for phase in row.job_peaks.phases.values())
    for host_memory, fits in ((least, True), (least - 2**20, False)):
        given = job | {
            "host_memory": f"{host_memory / 2**20}MiB",
            "activation_checkpointing": "none",
            "micro_batch_size": 1,
        }
        assert estimate(**given).any_fits is fits
        assert (search_of(**given).result.winner is not None) is fits
