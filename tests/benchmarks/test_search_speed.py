"""How long a recommendation takes. Run with `CASES=all pytest tests/benchmarks --benchmark-enable`; no test fails for being slow.

Every round begins with empty caches; only the catalog stays open.
"""

from __future__ import annotations

import sys

import pytest
from matrix import with_all_cases
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor import recommend

pytestmark = [pytest.mark.slow, with_all_cases]

QUESTIONS = {
    "llama": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"},
    "llama on 8": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8, "gpu": "H100"},
    "long": {"model": "Qwen/Qwen2-72B", "gpus": 64, "nnodes": 8, "gpu": "H100", "seq_len": 131_072},
    "405B": {"model": "meta-llama/Llama-3.1-405B", "gpus": 64, "nnodes": 8, "gpu": "H100"},
    "find batch": {"model": "Qwen/Qwen2.5-32B", "gpus": 16, "nnodes": 2, "gpu": "H100", "find": "batch"},
    "find sequence": {"model": "Qwen/Qwen2-72B", "gpus": 64, "nnodes": 8, "gpu": "H100", "find": "sequence"},
    "find gpus": {"model": "Qwen/Qwen2.5-32B", "gpu": "H100", "find": "gpus"},
    "find gpu-type": {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "H100", "find": "gpu-type"},
    "nothing fits": {"model": "meta-llama/Llama-3.1-405B", "gpus": 8, "gpu": "RTX-4090", "offload": "none"},
}


def _clear_caches() -> None:
    """Clear every cache of the computing packages."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fsdp_advisor.memory", "fsdp_advisor.engines", "fsdp_advisor.timing", "fsdp_advisor.rows")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.mark.parametrize("name", QUESTIONS)
def test_recommend(benchmark: BenchmarkFixture, name: str) -> None:
    benchmark.pedantic(lambda: recommend(**QUESTIONS[name]), setup=_clear_caches, rounds=3)
