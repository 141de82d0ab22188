"""`find`: each answer is the last that fits, and the next does not."""

from __future__ import annotations

from typing import Any

import pytest
from asked import GPT2, LLAMA, advise, clock, search_of

from fsdp_advisor.advice.finding import Finding
from fsdp_advisor.advice.settling import NEAR, anything
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import find_gpu, list_gpus


def found(**options: Any) -> Finding:
    finding = advise(**options).finding
    assert finding is not None
    return finding


def test_the_largest_batch() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 8, "gpu": "A100-40GB"}
    finding = found(**job, find="batch")
    assert finding.winner is not None
    fitting = [c.plan.micro_batch_size for c in finding.rows if c.walked and c.fits]
    assert finding.answer == finding.winner.plan.micro_batch_size == max(fitting)
    search = search_of(**job, offload="none")
    for row in finding.rows:
        if row.walked is None or not row.fits:  # by the cheap figures
            assert not search.at(row.family, row.plan.micro_batch_size + 1).fits
    search.judge.allocator.allow(100)
    for row in (finding.winner, *(c for c in finding.rows if c.plan.micro_batch_size > finding.answer)):
        assert not search.judge.walked(search.at(row.family, finding.answer + 1))[-1].fits


def test_the_largest_batch_of_a_global_batch_divides_it() -> None:
    finding = found(model=LLAMA, gpus=8, gpu="A100-40GB", find="batch", global_batch_size=96)
    assert {c.global_batch_size for c in finding.rows} == {96}


def test_the_longest_sequence() -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "H100", "activation_checkpointing": "full"}
    finding = found(**job, find="sequence")
    assert isinstance(finding.answer, int)
    assert finding.winner is not None
    assert finding.winner.plan.seq_len == finding.answer
    beyond = int(finding.answer * (1 + 1.5 * NEAR))  # it is not looked for nearer
    assert not advise(**job, offload="none", micro_batch_size=1, seq_len=beyond).fits
    lengths = [c.plan.seq_len for c in finding.frontier]
    assert lengths == sorted(lengths)
    assert lengths[-1] == finding.answer


def test_the_longest_sequence_stops_at_the_models_maximum() -> None:
    finding = found(model=GPT2, gpus=2, gpu="H100", find="sequence")
    assert finding.answer == 1024
    assert "the model's own maximum" in finding.because


def test_the_fewest_gpus() -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpu": "H100"}
    finding = found(**job, find="gpus")
    assert finding.answer == 16  # 8 would leave 3 %
    assert not advise(**job, gpus=8, offload="none").fits
    assert [c.plan.world_size for c in finding.rows] == [16, 32, 64, 128]
    assert [c.plan.nnodes for c in finding.rows] == [2, 4, 8, 16]
    assert found(**job, find="gpus", margin=0).answer == 8
    assert not advise(**job, gpus=7, offload="none", margin=0).fits
    assert (
        found(**job, gpus=4, find="gpus").winner is None
        or found(**job, gpus=4, find="gpus").winner.plan.offload != "none"
    )  # type: ignore[union-attr]


def test_the_fewest_gpus_divide_the_global_batch() -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", "find": "gpus"}
    assert found(**job, global_batch_size=48).answer == 16
    assert found(**job, global_batch_size=48, margin=0).answer == 8
    assert found(**job, global_batch_size=50).answer == 1  # 2, 5 of 8 do not hold it: offload does on one
    exact = found(**job, global_batch_size=128, micro_batch_size=2, gradient_accumulation_steps=4)
    assert exact.answer == 16


def test_the_smallest_gpu() -> None:
    finding = found(model="Qwen/Qwen2.5-7B", gpus=4, find="gpu-type")
    rows = {c.gpu: c for c in finding.rows}
    assert set(rows) == {gpu.name for gpu in list_gpus() if gpu.bf16_flops}
    fitting = [find_gpu(c.gpu).memory_bytes for c in finding.rows if c.fits]
    assert fitting == sorted(fitting)
    assert find_gpu(str(finding.answer)).memory_bytes == fitting[0]
    assert all(find_gpu(c.gpu).memory_bytes <= fitting[0] for c in finding.rows if not c.fits)


def test_offload_is_looked_at_where_it_is_asked_for_or_the_host_is_known() -> None:
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", "find": "gpus"}
    assert found(**job).answer == 16
    assert found(**job, offload="parameters").answer == 1
    assert found(**job, host_memory="1TiB").answer == 1
    assert "offload was not looked at" in " ".join(advise(**job).notes)


def test_layers_are_needed_for_a_batch() -> None:
    for what in ("batch", "sequence"):
        with pytest.raises(UsageError, match="bare parameter count"):
            advise(clock, model="7e9", gpus=4, find=what)
    assert found(model="7e9", gpu="H100", find="gpus").answer == 2


def test_no_smaller_number_of_gpus_would_do() -> None:
    """Shards of 8 experts on more than 8 GPUs are padded: a number that does not fit says nothing of a smaller one."""
    job: dict[str, Any] = {"model": "mistralai/Mixtral-8x22B-v0.1", "gpu": "H100"}
    answer = found(**job, find="gpus").answer
    assert isinstance(answer, int)
    for gpus in (*range(1, 9), *range(16, answer, 8)):
        for backend in ("fsdp2", "deepspeed"):
            search = search_of(**job, gpus=gpus, nnodes=-(-gpus // 8), offload="none", backend=backend)
            assert (nearest := anything(search)) is None or not nearest.fits
