"""`--find`: the largest batch, the longest sequence, the fewest GPUs, the smallest GPU."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import in_turn, of_today, with_all_cases
from searches import GPT2, LLAMA, advise, clock, search_of

from fsdp_advisor.advice.sweeps import SweepResult
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import find_gpu, list_gpus


def sweep(**options: Any) -> SweepResult:
    found = advise(**options).sweep
    assert found is not None
    return found


BEYOND = 1.1
"""Sizes larger by this factor are checked not to fit."""
FSDP2 = {"strategy": "zero3", "backend": "fsdp2"}
"""One strategy, so that a search takes a second."""


@pytest.mark.parametrize("margin", of_today([0, 0.2], days=2))
def test_largest_batch_fits_and_a_larger_one_does_not(margin: float) -> None:
    job: dict[str, Any] = {
        "model": GPT2,
        "gpus": 4,
        "gpu": "24GiB",
        "seq_len": 256,
        "offload": "none",
        "margin": margin,
    }
    found = sweep(**job, find="batch")
    assert found.winner is not None and found.winner.fits
    assert (
        found.answer == found.winner.plan.micro_batch_size == max(c.plan.micro_batch_size for c in found.rows if c.fits)
    )
    search = search_of(**job)
    larger = int(found.winner.plan.micro_batch_size * BEYOND)
    assert not any(search.candidate(choice, larger).fits for choice in search.choices if search.may_fit(choice, larger))


@in_turn(0, of=2)
def test_largest_batch_divides_the_global_batch() -> None:
    found = sweep(model=GPT2, gpus=8, gpu="24GiB", find="batch", global_batch_size=96)
    assert {c.plan.global_batch_size for c in found.rows} == {96}


@in_turn(1, of=3)
def test_largest_batch_is_that_of_a_job_without_a_micro_batch() -> None:
    job: dict[str, Any] = {"model": GPT2, "gpus": 4, "gpu": "24GiB", "seq_len": 256, "find": "batch"}
    assert sweep(**job, micro_batch_size=4).answer == sweep(**job).answer


@in_turn(2, of=4)
def test_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB", "offload": "none", **FSDP2}
    advice = advise(**job, find="sequence", micro_batch_size=8)
    found = advice.sweep
    assert found is not None and found.winner is not None and found.winner.fits
    assert found.winner.plan.seq_len == found.answer
    assert not advise(**job, micro_batch_size=8, seq_len=int(found.winner.plan.seq_len * BEYOND)).fits
    at_its_length = advise(**job, micro_batch_size=8, seq_len=found.answer)
    assert [saving.saved_bytes for saving in advice.savings] == [saving.saved_bytes for saving in at_its_length.savings]
    lengths = [c.plan.seq_len for c in found.frontier]
    assert all(length % 128 == 0 for length in lengths)
    assert lengths == sorted(lengths)
    assert lengths[-1] == found.answer


def test_longest_sequence_stops_at_the_maximum_of_the_model() -> None:
    found = sweep(model=GPT2, gpus=2, gpu="H100", find="sequence")
    assert found.answer == 1024
    assert "the model's own maximum" in found.because


@in_turn(0, of=3)
def test_a_sweep_over_gpus_starts_with_the_fewest_that_fit() -> None:
    one_plan = {**FSDP2, "offload": "none", "activation_checkpointing": "full", "micro_batch_size": 1}
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", **one_plan}
    found = sweep(**job, find="gpus")
    assert found.answer == 8
    assert search_of(**job, gpus=4).any_fit() is None
    assert [c.plan.world_size for c in found.rows] == [8, 16, 32, 64]
    assert [c.plan.nnodes for c in found.rows] == [1, 2, 4, 8]
    assert all(c.fits for c in found.rows)


@in_turn(0, of=2)
def test_a_sweep_over_gpus_evaluates_with_the_batches_of_each_number() -> None:
    """Fewer GPUs keep the logits of more batches each."""
    job: dict[str, Any] = {"model": GPT2, "gpu": "A100-40GB", "framework": "trainer", "seq_len": 256, "strategy": "ddp"}
    job |= {"eval_strategy": "steps", "compute_metrics": True, "eval_samples": 64, "micro_batch_size": 1}
    found = sweep(**job, gpus=2, find="gpus", offload="none", activation_checkpointing="none")
    kept = {row.plan.world_size: row.plan.evaluation.kept_batches for row in found.rows if row.plan.evaluation}
    assert kept == {1: 8, 2: 4}


@in_turn(3, of=4)
def test_fewest_gpus_offloads_if_the_given_gpus_are_too_few() -> None:
    found = sweep(model="Qwen/Qwen2.5-32B", gpu="H100", gpus=4, find="gpus", **FSDP2)
    assert found.winner is not None
    assert found.winner.plan.offload != "none"
    assert found.winner.plan.world_size <= 4


@with_all_cases
def test_fewest_gpus_divide_the_global_batch() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpu": "24GiB", "find": "gpus"}
    assert sweep(**job, global_batch_size=48).answer == 6
    assert sweep(**job, global_batch_size=50).answer == 1  # only 1, 2 and 5 divide it: one GPU with offload
    exact = sweep(**job, global_batch_size=128, micro_batch_size=2, gradient_accumulation_steps=4)
    assert exact.answer == 16  # 8 would need an accumulation of 8


@with_all_cases
def test_no_smaller_number_of_gpus_fits() -> None:
    """FSDP2 pads tensors of 8 experts on more than 8 GPUs: that one number does not fit says nothing about a smaller one."""
    job: dict[str, Any] = {"model": "mistralai/Mixtral-8x22B-v0.1", "gpu": "H100", "offload": "none"}
    answer = sweep(**job, find="gpus").answer
    assert isinstance(answer, int)
    for gpus in (*range(1, 9), *range(16, answer, 8)):
        assert search_of(**job, gpus=gpus, nnodes=-(-gpus // 8)).any_fit() is None


@in_turn(1, of=4)
def test_a_sweep_over_gpu_types_answers_with_the_smallest_that_fits() -> None:
    found = sweep(model=GPT2, gpus=2, find="gpu-type", precision="fp16-mixed", **FSDP2)
    assert {c.gpu for c in found.rows} == {gpu.name for gpu in list_gpus()}
    fitting = [find_gpu(c.gpu).memory_bytes for c in found.rows if c.fits]
    assert fitting == sorted(fitting)
    assert find_gpu(str(found.answer)).memory_bytes == fitting[0]
    assert found.winner is not None and found.winner.gpu == found.answer


@in_turn(2, of=4)
def test_gpus_that_do_not_compute_in_bf16_are_left_out() -> None:
    found = sweep(model=GPT2, gpus=1, find="gpu-type", strategy="ddp", micro_batch_size=1)
    assert {c.gpu for c in found.rows} == {gpu.name for gpu in list_gpus() if gpu.bf16_flops}


@in_turn(3, of=4)
def test_gpus_without_the_kernels_of_flash_attention_are_left_out() -> None:
    job: dict[str, Any] = {
        "model": GPT2,
        "gpus": 1,
        "strategy": "ddp",
        "micro_batch_size": 1,
        "precision": "fp16-mixed",
    }
    found = sweep(**job, find="gpu-type", attention="flash_attention_2")
    tried = {str(c.gpu) for c in found.rows}
    assert "A100-80GB" in tried and not tried & {"T4", "V100-32GB"}


@with_all_cases
def test_offload_is_searched_if_asked_for_or_if_the_host_is_known() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpu": "24GiB", "find": "gpus"}
    assert sweep(**job, offload="parameters").answer == 1
    assert sweep(**job, host_memory="2TiB").answer == 1
    assert "offload was not searched" in " ".join(advise(**job).notes)


@in_turn(5, of=8)
def test_fewest_gpus_with_offload_names_the_number_without_it() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpu": "40GiB", "find": "gpus"}
    least = sweep(**job, offload="none").answer
    assert least == 4
    found = sweep(**job, gpus=2)
    assert found.winner is not None and found.winner.plan.offload != "none"
    assert found.because.endswith(f"with offload to the host; without offload it needs {least}")


def test_batch_and_sequence_need_layers() -> None:
    for what in ("batch", "sequence"):
        with pytest.raises(UsageError, match="bare parameter count"):
            advise(clock, model="7e9", gpus=4, find=what)
    assert sweep(model="7e9", gpu="H100", find="gpus").answer == 2
