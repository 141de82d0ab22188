"""Predicted states equal those of real runs over gloo, to the byte, for shapes that do not divide by the world size."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from matrix import ALL, in_turn, taken
from ranks import run_ranks

torch = pytest.importorskip("torch")

from fsdp_advisor.engines.registry import states_of  # after the check for torch
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, TransformersSource

WORKER = Path(__file__).with_name("states_worker.py")
sys.path.insert(0, str(WORKER.parent))
from states_worker import CONFIG  # the worker's own model

pytestmark = pytest.mark.slow

BACKENDS = (("ddp", "ddp"), ("fsdp1", "zero3"), ("fsdp1", "zero2"), ("fsdp2", "zero3"), ("fsdp2", "zero2"))


def plans_of(world: int) -> list[Plan]:
    return [
        Plan(
            strategy=strategy,
            backend=backend,
            mesh=Mesh(dp_replicate=world) if backend == "ddp" else Mesh(dp_shard=world),
            precision=precision,
            optim=optim,
            seq_len=8,
            micro_batch_size=2,
        )
        for (backend, strategy), precision, optim in itertools.product(
            BACKENDS, ("fp32", "bf16", "bf16-mixed"), ("adamw_torch_fused", "adamw_torch", "sgd_momentum")
        )
    ]


@in_turn(4, of=5)
@pytest.mark.parametrize("world", taken([3], [2]))
def test_predicted_states_equal_a_real_run(world: int) -> None:
    """On three ranks a third of the plans runs, with every pair of engine, precision and optimizer."""
    plans = plans_of(world)
    if world == 3 and not ALL:
        plans = [plan for n, plan in enumerate(plans) if (n // 9 + n // 3 + n) % 3 == 0]
    printed = run_ranks(WORKER, json.dumps([asdict(p) for p in plans]), ranks=world)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == len(plans), printed[:3000]
    profile = Recorder(TransformersSource(CONFIG, name="odd")).profile
    for plan, line in zip(plans, lines, strict=True):
        states = states_of(profile, plan)
        assert {
            "parameters": states.parameters.exact,
            "gradients": states.gradients.exact,
            "optimizer": states.optimizer.exact,
        } == json.loads(line), plan
