"""How long the walk through the caching allocator takes: all steps until the state repeats, every storage of every layer.

Run with `pytest tests/benchmarks --benchmark-enable`; nothing here fails for being slow.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.plan import Plan, plans
from fsdp_advisor.memory.allocator import AllocatorConf, Reserved, reserve
from fsdp_advisor.memory.allocator.reserve import _with_room
from fsdp_advisor.memory.libraries import allocated
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.tapes import tape_key_of

DEPTHS = {"32 layers": "meta-llama/Llama-2-7b-hf", "126 layers": "meta-llama/Llama-3.1-405B"}
STRATEGIES = [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "fsdp1"), ("zero2", "deepspeed"), ("zero3", "deepspeed")]


def job(model: str, strategy: str, backend: str) -> tuple[Profile, Tape, Plan]:
    profile = resolve(model).profile
    assert profile is not None
    request = make_request({"model": model, "gpus": 8, "strategy": strategy, "backend": backend})
    plan = plans(request, seq_len=2048)[0]
    return profile, profile.tapes[tape_key_of(plan).name], plan


@pytest.mark.parametrize(("strategy", "backend"), STRATEGIES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("conf", ["segments", "expandable"])
def test_walk(benchmark: BenchmarkFixture, depth: str, strategy: str, backend: str, conf: str) -> None:
    profile, tape, plan = job(DEPTHS[depth], strategy, backend)
    settings = AllocatorConf(expandable_segments=conf == "expandable")

    def walk() -> Reserved:
        _with_room.cache_clear()  # walked each time
        return reserve(profile, tape, plan, conf=settings)

    result = benchmark(walk)
    assert result.steps_until_steady is not None


@pytest.mark.parametrize("depth", DEPTHS)
def test_under_pressure(benchmark: BenchmarkFixture, depth: str) -> None:
    """The driver refuses: two more walks, one of them with expandable segments."""
    profile, tape, plan = job(DEPTHS[depth], "zero3", "fsdp2")
    limit = int(reserve(profile, tape, plan).reserved_peak_bytes * 0.97)
    assert benchmark(lambda: reserve(profile, tape, plan, limit_bytes=limit)).verdict != "fits"


@pytest.mark.parametrize("depth", DEPTHS)
def test_allocated_without_the_walk(benchmark: BenchmarkFixture, depth: str) -> None:
    profile, tape, plan = job(DEPTHS[depth], "zero3", "fsdp2")
    assert benchmark(lambda: allocated(profile, tape, plan, workspace_bytes=2**25)).peak_bytes
