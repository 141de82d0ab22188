"""How long advice takes. Run with `pytest tests/benchmarks --benchmark-enable`; nothing here fails for being slow.

A candidate is one configuration: a family (strategy, backend, offload, checkpointing) on a number of GPUs at a micro-batch
and an accumulation, with its verdict and, where it fits, its speed. Every round begins with nothing remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor import recommend
from fsdp_advisor.advice.batches import Batches
from fsdp_advisor.advice.families import Job, families
from fsdp_advisor.advice.judge import Bytes, Judge
from fsdp_advisor.advice.search import Row, Search
from fsdp_advisor.estimator import step_seconds
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.request import RecommendRequest
from fsdp_advisor.model.resolve import resolve

MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
WORLDS = (8, 16, 32, 64)
ACCUMULATIONS = (1, 4)
MICRO_BATCHES = 600


def _forget() -> None:
    """Every cache of the arithmetic; the catalog stays open."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fsdp_advisor.memory", "fsdp_advisor.timing", "fsdp_advisor.estimator")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _rows() -> Iterator[tuple[int, Row]]:
    model = resolve(MODEL)
    request = RecommendRequest(model=MODEL)
    judge = Judge(
        model=model,
        gpu=find_gpu("H100-80GB"),
        margin=0.08,
        timer=step_seconds,
        host_available_bytes=None,
        bytes=Bytes(model),
    )
    job = Job.of(request, gpus=8, nnodes=1, seq_len=512)
    for world in WORLDS:
        nodes = -(-world // 8)
        for steps in ACCUMULATIONS:
            search = Search(
                judge=judge,
                job=replace(job, gpus=world, nnodes=nodes),
                batches=Batches(sizes=range(1, MICRO_BATCHES + 1), steps=steps),
                families=families(request, nnodes=nodes),
            )
            yield from ((world, row) for row in search.rows())


def test_a_hundred_thousand_candidates(benchmark: BenchmarkFixture) -> None:
    def answer() -> list[tuple[int, Row]]:
        return sorted(_rows(), key=lambda found: (*found[1].order, found[1].accumulation, found[0]))

    rows = benchmark.pedantic(answer, setup=_forget, rounds=3)
    assert len(rows) > 100_000
    benchmark.extra_info["candidates"] = len(rows)


QUESTIONS = {
    "llama": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"},
    "llama on 8": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8, "gpu": "H100"},
    "long": {"model": "Qwen/Qwen2-72B", "gpus": 64, "nnodes": 8, "gpu": "H100", "seq_len": 131_072},
    "find batch": {"model": "Qwen/Qwen2.5-32B", "gpus": 16, "nnodes": 2, "gpu": "H100", "find": "batch"},
    "find sequence": {"model": "Qwen/Qwen2-72B", "gpus": 64, "nnodes": 8, "gpu": "H100", "find": "sequence"},
    "find gpus": {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", "find": "gpus"},
    "find gpu-type": {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "H100", "find": "gpu-type"},
    "nothing fits": {"model": "meta-llama/Llama-3.1-405B", "gpus": 8, "gpu": "RTX-4090", "offload": "none"},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_recommend(benchmark: BenchmarkFixture, name: str) -> None:
    benchmark.pedantic(lambda: recommend(**QUESTIONS[name]), setup=_forget, rounds=3)
