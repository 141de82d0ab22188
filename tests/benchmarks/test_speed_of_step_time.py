"""What a step's time costs: on its own, at one GPU and at 1,024. Nothing here fails for being slow."""

from __future__ import annotations

import pytest
from matrix import with_all_cases
from pytest_benchmark.fixture import BenchmarkFixture

from fsdp_advisor import timing
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import catalog
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.tape_keys import tape_key_of

pytestmark = [pytest.mark.slow, with_all_cases]

H100 = find_gpu("H100")


@pytest.mark.parametrize("depth", ["meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-405B"])
@pytest.mark.parametrize("gpus", [8, 1024])
def test_step_time(benchmark: BenchmarkFixture, gpus: int, depth: str) -> None:
    entry = catalog.find(depth)
    assert entry is not None and H100.inter_node is not None
    profile, between = catalog.profile(entry), H100.inter_node
    plan = Plan(
        strategy="zero3",
        backend="fsdp2",
        mesh=Mesh(dp_shard=gpus, nnodes=gpus // 8),
        seq_len=2048,
        attention="flash_attention_2",
    )
    tape = profile.tapes[tape_key_of(plan).name]

    program = step_program(profile, tape, plan)
    benchmark(timing.step_time, profile, program, plan, H100, between)
