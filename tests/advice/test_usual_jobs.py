"""Recommendations for 53 usual jobs, from GPT-2 on one card to 405 billion parameters on 512 GPUs.

`golden/usual_jobs.txt` shows what is recommended for each, and why the next simpler strategy is not: read there what a change of
the ranking does. The tests take a few jobs each day, and all with `CASES=all`, in some minutes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matrix import of_today
from searches import estimate_of

from fsdp_advisor.advice import Recommendation, recommend
from fsdp_advisor.advice.ranking import OFFLOAD_RESOLUTION, speed

pytestmark = pytest.mark.slow

TABLE = Path(__file__).with_name("golden") / "usual_jobs.txt"

JOBS = """
openai-community/gpt2 1 RTX-4090
openai-community/gpt2 8 H100
openai-community/gpt2-xl 2 24GiB
google-bert/bert-base-uncased 1 T4
google-bert/bert-base-uncased 4 T4
google-bert/bert-base-uncased 8 A100-40GB
google/vit-base-patch16-224 1 RTX-4090
google/vit-base-patch16-224 8 A100-80GB
openai/whisper-large-v3 4 A100-80GB
google-t5/t5-11b 8 A100-40GB
google/flan-t5-large 4 RTX-4090
meta-llama/Llama-3.2-1B 1 RTX-4090
meta-llama/Llama-3.2-1B 8 H100
meta-llama/Llama-3.2-3B 1 H100
meta-llama/Llama-3.2-3B 4 A100-40GB
meta-llama/Llama-3.2-3B 2 RTX-4090
meta-llama/Llama-2-7b-hf 1 H100
meta-llama/Llama-2-7b-hf 4 A100-40GB
meta-llama/Llama-2-7b-hf 8 A100-40GB
meta-llama/Llama-2-7b-hf 8 RTX-4090
meta-llama/Llama-2-7b-hf 2 H200
meta-llama/Llama-3.1-8B 1 H100
meta-llama/Llama-3.1-8B 8 H100
meta-llama/Llama-3.1-8B 8 H100 seq_len=32768
meta-llama/Llama-3.1-8B 8 H100 seq_len=131072
meta-llama/Llama-3.1-8B 16 H100
meta-llama/Llama-3.1-8B 16 H100 interconnect=100GbE
meta-llama/Llama-3.1-8B 8 B200
meta-llama/Llama-3.1-8B 8 H100 global_batch_size=512 seq_len=8192
meta-llama/Llama-3.1-8B 8 H100 global_batch_size=512
meta-llama/Llama-3.1-8B 4 V100-32GB
meta-llama/Llama-3.1-8B 8 MI300X
mistralai/Mistral-7B-v0.1 8 A100-80GB
google/gemma-3-27b-pt 8 H100
microsoft/phi-4 8 MI300X
microsoft/phi-4 8 H100
meta-llama/Llama-2-13b-hf 8 A100-80GB
meta-llama/Llama-2-13b-hf 8 A100-40GB
Qwen/Qwen3-4B 2 RTX-4090 host_memory=64GiB
Qwen/Qwen3-32B 16 A100-80GB seq_len=16384
Qwen/Qwen2.5-32B 16 H100
Qwen/Qwen2.5-32B 8 H100
meta-llama/Llama-3.1-70B 8 H100
meta-llama/Llama-3.1-70B 16 H100
meta-llama/Llama-3.1-70B 64 H100
meta-llama/Llama-3.1-70B 8 T4 offload=none
meta-llama/Llama-3.1-70B 32 A100-80GB
meta-llama/Llama-3.1-405B 8 H100
meta-llama/Llama-3.1-405B 64 H100
meta-llama/Llama-3.1-405B 512 H100
mistralai/Mixtral-8x7B-v0.1 16 H100
Qwen/Qwen3-30B-A3B 8 H100
Qwen/Qwen3-235B-A22B 64 H100
""".strip().splitlines()
"""Model, GPUs, GPU type, and further options."""
TAKEN = of_today(JOBS, 40)


@cache
def advised(job: str) -> Recommendation:
    model, gpus, gpu, *rest = job.split()
    options: dict[str, Any] = dict(option.split("=") for option in rest)
    return recommend(model=model, gpus=gpus, gpu=gpu, **options).recommendation


@pytest.mark.parametrize("job", TAKEN)
def test_winner_and_runners_up_fit_by_estimate(job: str) -> None:
    recommendation = advised(job)
    found = [
        c for c in (recommendation.winner, *(other.candidate for other in recommendation.runners_up)) if c is not None
    ]
    for candidate in found:
        row = estimate_of(candidate, recommendation.request.model)
        assert row.fits is True
        assert row.needed_bytes == candidate.needed_bytes
    assert found or recommendation.remedies


@pytest.mark.parametrize("job", TAKEN)
def test_offload_is_recommended_only_if_it_is_clearly_faster(job: str) -> None:
    winner, others = advised(job).winner, advised(job).runners_up
    if winner is not None and winner.plan.offload != "none":
        on_gpu = [other.candidate for other in others if other.candidate.plan.offload == "none"]
        assert all(speed(winner) > (1 + OFFLOAD_RESOLUTION) * speed(c) for c in on_gpu)


def test_the_table_has_every_job(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        TABLE.write_text("\n".join(_lines(job, advised(job)) for job in JOBS))
    assert [line for line in TABLE.read_text().splitlines() if line and not line.startswith(" ")] == JOBS


@pytest.mark.parametrize("job", TAKEN)
def test_the_recommendation_is_that_of_the_table(job: str) -> None:
    assert _lines(job, advised(job)) in TABLE.read_text()


def _lines(job: str, recommendation: Recommendation) -> str:
    winner = recommendation.winner
    if winner is None:
        return "\n".join([job, "  nothing fits", *(f"  {remedy.because}" for remedy in recommendation.remedies), ""])
    batch = f"micro-batch {winner.plan.micro_batch_size}, accumulation {winner.plan.gradient_accumulation_steps}"
    lines = [job, f"  {winner.label}, {batch}", f"  {recommendation.why_not_simpler or 'no strategy is simpler'}", ""]
    return "\n".join(lines)
