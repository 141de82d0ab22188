"""A setting that changes what a step sends changes its time and its memory together.

Expected seconds are ratios of bytes: the network is so slow that latencies are negligible, so time is proportional to bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import Job, job, peak_of, program_of

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.hardware.links import ETHERNET_100G
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.program.instructions import ReduceScatter
from fsdp_advisor.timing import StepTime, step_time, timeline

A100 = find_gpu("A100")
SLOW = replace(ETHERNET_100G, bytes_per_s=1e8)
BF16, FP32 = 2, 4
MICRO_BATCHES = 4
GPT2 = "openai-community/gpt2"
LATENCIES = 0.02
"""The share of the time of these collectives that does not depend on bytes is lower than this."""


def two_nodes(strategy: str, **options: Any) -> Job:
    """GPT-2 under FSDP2 and bf16-mixed on two nodes of two GPUs."""
    return job(GPT2, strategy, "fsdp2", nnodes=2, precision="bf16-mixed", **options)


def time_of(found: Job) -> StepTime:
    profile, tape, plan = found
    time = step_time(profile, program_of(profile, tape, plan), plan, A100, SLOW)
    assert time is not None
    return time


def seconds_of(found: Job, collective: str) -> float:
    """Seconds of one kind of collective in the last micro-batch."""
    profile, tape, plan = found
    shown = timeline(profile, program_of(profile, tape, plan), plan, A100, SLOW)
    return sum(each.end_seconds - each.begin_seconds for each in shown if each.name.startswith(collective))


def reductions_per_step(found: Job) -> int:
    return sum(
        micro_batch.times * isinstance(instruction, ReduceScatter)
        for micro_batch in program_of(*found).micro_batches
        for visit in micro_batch.visits
        for instruction in visit.instructions
    )


IN_BF16 = [
    name for name, facts in FRAMEWORKS.items() if facts.reduce_dtype == "compute" and facts.default_loss == "full"
]
"""Frameworks whose steps the catalog has."""


@pytest.mark.parametrize("framework", IN_BF16)
def test_accelerate_reduces_in_bf16_which_halves_the_time_of_reduction(framework: str) -> None:
    torch, accelerate = two_nodes("zero2"), two_nodes("zero2", framework=framework)
    halved = seconds_of(torch, "reduce-scatter") * BF16 / FP32
    assert seconds_of(accelerate, "reduce-scatter") == pytest.approx(halved, rel=LATENCIES)
    assert seconds_of(accelerate, "all-gather") == pytest.approx(seconds_of(torch, "all-gather"), rel=LATENCIES)
    # per parameter, ZeRO-2 gathers once in bf16 and reduces once
    torch_seconds, seconds = time_of(torch).communication_seconds, time_of(accelerate).communication_seconds
    assert seconds / torch_seconds == pytest.approx((BF16 + BF16) / (BF16 + FP32), rel=LATENCIES)


def test_accelerate_reduces_in_fp32_what_computes_in_fp32() -> None:
    torch, accelerate = (
        job(GPT2, "zero2", "fsdp2", nnodes=2, precision="fp32", framework=name) for name in ("torch", "accelerate")
    )
    seconds = time_of(torch).communication_seconds
    assert time_of(accelerate).communication_seconds == pytest.approx(seconds, rel=LATENCIES)


@pytest.mark.parametrize("framework", ["torch", "accelerate", "trainer"])
def test_deferred_reduction_happens_once_per_step(framework: Any) -> None:
    one = two_nodes("zero2", framework=framework)
    four = two_nodes("zero2", framework=framework, gradient_accumulation_steps=MICRO_BATCHES)
    reductions = 1 if FRAMEWORKS[framework].defers_reduction else MICRO_BATCHES
    assert reductions_per_step(four) == reductions * reductions_per_step(one) > 0
    reduced = BF16 if FRAMEWORKS[framework].reduce_dtype == "compute" else FP32
    ratio = (MICRO_BATCHES * BF16 + reductions * reduced) / (BF16 + reduced)
    seconds = time_of(one).communication_seconds
    assert time_of(four).communication_seconds == pytest.approx(ratio * seconds, rel=LATENCIES)


def test_deferred_reduction_keeps_whole_gradients_in_memory() -> None:
    options = {"gradient_accumulation_steps": MICRO_BATCHES, "micro_batch_size": 4}
    torch, accelerate = two_nodes("zero2", **options), two_nodes("zero2", framework="accelerate", **options)
    profile, _, plan = accelerate
    at_peak, reduced_each_time = peak_of(*accelerate).at_peak, peak_of(*torch).at_peak
    assert at_peak["unsharded_gradients"] >= profile.trainable_parameters * BF16
    assert at_peak["gradients"] == 0
    assert reduced_each_time["unsharded_gradients"] < profile.trainable_parameters * BF16
    assert reduced_each_time["gradients"] >= profile.trainable_parameters * FP32 / plan.shard_degree


def exposed_share(found: Job) -> float:
    """The share of communication during which nothing computes, over a network of ordinary speed."""
    profile, tape, plan = found
    time = step_time(profile, program_of(profile, tape, plan), plan, A100, ETHERNET_100G)
    assert time is not None
    return time.breakdown["communication"] / time.communication_seconds


def test_one_unit_for_the_whole_model_hides_almost_no_communication() -> None:
    """`--wrap none`: no compute is left when the unit is reduced, nor for which its parameters are not needed."""
    layers, whole = (job(GPT2, "zero3", "fsdp2", wrap=wrap, micro_batch_size=8) for wrap in ("layer", "none"))
    forward, backward, reduced = BF16, BF16, FP32
    assert exposed_share(whole) >= (1 - LATENCIES) * (backward + reduced) / (forward + backward + reduced)
    assert exposed_share(layers) < exposed_share(whole) - 0.1


def test_one_unit_for_the_whole_model_gathers_all_parameters_at_once() -> None:
    layers, whole = (job(GPT2, "zero3", "fsdp2", wrap=wrap, micro_batch_size=8) for wrap in ("layer", "none"))
    all_parameters = layers[0].parameters * BF16
    assert peak_of(*whole).at_peak["unsharded_parameters"] >= all_parameters
    assert peak_of(*layers).at_peak["unsharded_parameters"] < all_parameters


def test_forward_waits_for_the_parameters_of_the_root() -> None:
    """The embedding is one of the root's parameters, so that no layer's compute hides the root's all-gather."""
    profile, tape, plan = job(GPT2, "zero3", "fsdp2", micro_batch_size=8)
    shown = timeline(profile, program_of(profile, tape, plan), plan, A100, ETHERNET_100G)
    gather = next(each for each in shown if each.stream == "communication")
    computes = [each for each in shown if each.stream == "compute" and each.begin_seconds >= gather.end_seconds]
    assert gather.begin_seconds == 0
    assert computes[0].name == "forward GPT2LMHeadModel"


def test_resharding_within_a_node_gathers_again_without_the_network() -> None:
    """With `reshard_after_forward=2` on two nodes of two GPUs, the gathers of backward stay in the node, at a cost in memory."""
    all_ranks, node = two_nodes("zero3"), two_nodes("zero3", reshard_after_forward="2")
    assert seconds_of(node, "all-gather") == pytest.approx(seconds_of(all_ranks, "all-gather") / 2, rel=LATENCIES)
    # of the layers, when the root's forward ends
    kept = sum(unit.elements for unit in all_ranks[0].layers()) * BF16 // 2
    more = peak_of(*node).phase_peaks["forward"] - peak_of(*all_ranks).phase_peaks["forward"]
    assert 0.9 * kept < more < 1.1 * kept


def test_keeping_parameters_after_forward_halves_the_gathers_of_hsdp() -> None:
    freed, kept = (job(GPT2, "hsdp", "fsdp1", gpus=8, reshard_after_forward=value) for value in ("auto", "false"))
    gathered = [seconds_of(found, "all-gather") for found in (freed, kept)]
    assert 0.4 < gathered[1] / gathered[0] < 0.7  # the root is gathered once in both


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_forward_prefetch_gathers_the_same_and_holds_one_more_layer(backend: str) -> None:
    plain, ahead = (
        job(GPT2, "zero3", backend, forward_prefetch=on, activation_checkpointing="full") for on in (False, True)
    )
    assert seconds_of(ahead, "all-gather") == pytest.approx(seconds_of(plain, "all-gather"))
    assert peak_of(*ahead).phase_peaks["forward"] >= peak_of(*plain).phase_peaks["forward"]
