"""Bytes per element by backend and precision."""

from __future__ import annotations

import pytest

from fsdp_advisor.engines.deepspeed.settings import master_bytes
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.policies.precision import precision_of

WEIGHT = Parameter(name="weight", shape=(3, 5))


def plan(backend: str, precision: str, framework: str = "torch") -> Plan:
    strategy = "ddp" if backend == "ddp" else "zero3"
    return Plan(
        strategy=strategy, backend=backend, precision=precision, framework=framework, mesh=Mesh(dp_shard=4), seq_len=16
    )


@pytest.mark.parametrize(
    ("backend", "precision", "framework", "stored", "compute", "reduced", "stepped"),
    [
        ("fsdp2", "bf16-mixed", "torch", 4, 2, 4, 4),
        ("fsdp2", "bf16-mixed", "accelerate", 4, 2, 2, 4),
        ("ddp", "bf16-mixed", "accelerate", 4, 2, 4, 4),
        ("fsdp1", "bf16", "torch", 2, 2, 2, 2),
        ("fsdp1", "fp32", "torch", 4, 4, 4, 4),
        ("deepspeed", "bf16-mixed", "torch", 2, 2, 2, 4),
        ("deepspeed", "fp32", "torch", 4, 4, 4, 4),
    ],
)
def test_bytes_per_element(
    backend: str, precision: str, framework: str, stored: int, compute: int, reduced: int, stepped: int
) -> None:
    policy = precision_of(plan(backend, precision, framework))
    assert policy.storage_bytes(WEIGHT) == stored
    assert (policy.compute_bytes, policy.reduce_bytes, policy.stepped_bytes) == (compute, reduced, stepped)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "fp16-mixed"])
def test_only_deepspeed_has_masters_beyond_the_parameters(precision: str) -> None:
    deepspeed = plan("deepspeed", precision)
    assert precision_of(deepspeed).master_bytes == master_bytes(deepspeed)
    assert precision_of(plan("fsdp2", precision)).master_bytes is None
