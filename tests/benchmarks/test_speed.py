"""How long an answer takes. Run with `CASES=all pytest tests/benchmarks --benchmark-enable`; nothing here fails for being slow.

Cold starts are whole processes; compare `cold estimate` with `cold libraries`, in the same run, as a ratio.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from matrix import with_all_cases
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor import estimate

pytestmark = [pytest.mark.slow, with_all_cases]

COLD = {
    "cold libraries": ["-c", "import pydantic, typer, rich"],
    "cold estimate": ["-m", "fsdp_advisor", "estimate", "--json", "-q", "--gpu", "H100", "--gpus", "4", "--model",
        "meta-llama/Llama-2-7b-hf"],
}  # fmt: skip


@pytest.mark.parametrize("what", COLD)
def test_cold(benchmark: BenchmarkFixture, what: str) -> None:
    def run() -> int:
        return subprocess.run([sys.executable, *COLD[what]], stdout=subprocess.DEVNULL).returncode

    assert benchmark(run) in (0, 1)


DEPTHS = {
    "24 layers": "bigscience/bloom-560m",
    "32 layers": "meta-llama/Llama-2-7b-hf",
    "126 layers": "meta-llama/Llama-3.1-405B",
}
STRATEGIES = [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "fsdp1"), ("zero2", "deepspeed"), ("zero3", "deepspeed")]


@pytest.mark.parametrize(("strategy", "backend"), STRATEGIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_warm(benchmark: BenchmarkFixture, depth: str, strategy: str, backend: str) -> None:
    def answer() -> None:
        estimate(model=DEPTHS[depth], gpus=8, gpu="H100", strategy=strategy, backend=backend)

    answer()
    benchmark(answer)


@pytest.mark.parametrize(("strategy", "backend"), STRATEGIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_new_batch_and_length(benchmark: BenchmarkFixture, depth: str, strategy: str, backend: str) -> None:
    """Points that have not been asked for before."""
    lengths = itertools.count(512)

    def answer() -> None:
        estimate(model=DEPTHS[depth], gpus=8, gpu="H100", strategy=strategy, backend=backend, seq_len=next(lengths))

    answer()
    benchmark(answer)
