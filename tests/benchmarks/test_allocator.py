"""How long the caching allocator's simulation takes: all steps until the state repeats, every storage of every layer.

Run with `CASES=all pytest tests/benchmarks --benchmark-enable`; nothing here fails for being slow.
"""

from __future__ import annotations

import pytest
from jobs import job, operations_of
from matrix import with_all_cases
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor.memory.allocator import AllocatorConf, simulate_allocator

pytestmark = [pytest.mark.slow, with_all_cases]

DEPTHS = {"32 layers": "meta-llama/Llama-2-7b-hf", "126 layers": "meta-llama/Llama-3.1-405B"}
STRATEGIES = [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "fsdp1"), ("zero2", "deepspeed"), ("zero3", "deepspeed")]


@pytest.mark.parametrize(("strategy", "backend"), STRATEGIES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("conf", ["segments", "expandable"])
def test_simulation(benchmark: BenchmarkFixture, depth: str, strategy: str, backend: str, conf: str) -> None:
    operations = operations_of(*job(DEPTHS[depth], strategy, backend, gpus=8, seq_len=2048))
    settings = AllocatorConf(expandable_segments=conf == "expandable")
    assert benchmark(simulate_allocator, operations, conf=settings).steps_until_steady is not None


@pytest.mark.parametrize("depth", DEPTHS)
def test_operations(benchmark: BenchmarkFixture, depth: str) -> None:
    planned = job(DEPTHS[depth], "zero3", "fsdp2", gpus=8, seq_len=2048)
    assert benchmark(operations_of, *planned).following
