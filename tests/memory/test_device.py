"""What CUDA and NCCL take, against public readings; and the verdict's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import pytest

from fsdp_advisor.hardware import GPUS, Gpu, find_gpu
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import (
    BUFFER_BYTES,
    DeviceOverhead,
    communicators,
    connection_bytes,
    device_overhead,
)
from fsdp_advisor.parallelism.mesh import Mesh

MIB, GIB = 2**20, 2**30


def plan(backend: str = "fsdp2", strategy: str = "zero3", ranks: int = 8, nnodes: int = 1) -> Plan:
    shards = {"ddp": 1, "hsdp": ranks // nnodes}.get(strategy, ranks)
    return Plan(
        strategy=strategy,
        backend=backend,
        mesh=Mesh(dp_shard=shards, dp_replicate=ranks // shards, nnodes=nnodes),
        seq_len=1,
    )


@dataclass(frozen=True)
class Reading:
    """The memory that a process has in addition to PyTorch's reserved memory: in use, less allocated, less reserved but unallocated."""

    source: str
    gpu: str
    plan: Plan
    n_bytes: float
    lazy_loading: bool = True


READINGS = (
    Reading("pytorch/pytorch#54564, 2021", "RTX-3090", plan("ddp", "ddp", 1), 1001 * MIB, lazy_loading=False),
    Reading(
        "transformers, perf_train_gpu_one.mdx, 2022", "V100-16GB", plan("ddp", "ddp", 1), 1343 * MIB, lazy_loading=False
    ),
    Reading("meta-pytorch/torchrec#3580, used 6753, reserved 5964", "A100-80GB", plan("ddp", "ddp", 2), 789 * MIB),
    Reading("NVIDIA/nccl#1685, before the all-to-all", "H100-80GB", plan(ranks=8), 1.06e9),
    Reading("tests/records/README.md, FSDP2 over NCCL", "H100-80GB", plan(ranks=1), 49_624_449_024 - 48_232_398_848),
    Reading(
        "hiyouga/LlamaFactory#7532", "A800-80GB", plan("deepspeed", ranks=48, nnodes=6), (76.92 - 73.28 - 1.59) * GIB
    ),
)


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: r.source)
def test_public_readings_lie_within(reading: Reading) -> None:
    found = device_overhead(find_gpu(reading.gpu), reading.plan, lazy_loading=reading.lazy_loading)
    assert found.low_bytes <= reading.n_bytes <= found.high_bytes


def test_the_context_of_cuda_is_as_large_as_reported() -> None:
    """invoke-ai/InvokeAI#9413: 256 MiB on an RTX 3090 before any kernel ran (torch 2.7, driver 610)."""
    context, kernels = device_overhead(find_gpu("RTX-3090"), plan("ddp", "ddp", 1)).parts
    assert (context.name, kernels.name) == ("CUDA context", "kernels")
    assert context.low_bytes <= 256 * MIB <= context.high_bytes


def test_the_buffers_of_nccl_are_as_large_as_reported() -> None:
    """NVIDIA/nccl#964: 544 MB for a group of two, 688 MB for one of more, on four A100 with NVLink."""
    for ranks, n_bytes in ((2, 544 * MIB), (4, 688 * MIB)):
        parts = [p for p in device_overhead(find_gpu("A100"), plan(ranks=ranks)).parts if p.name.startswith("NCCL")]
        nccl = DeviceOverhead(tuple(parts))
        assert nccl.low_bytes <= n_bytes <= nccl.high_bytes


def test_a_connections_buffers() -> None:
    """NVIDIA/nccl#1685 lists allocations of 10485760 and 2097152 bytes; another project found 9641984 before rounding."""
    assert sum(BUFFER_BYTES.values()) == 9_633_792
    assert connection_bytes() == 10_485_760 + 2_097_152


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_every_gpu_with_a_known_runtime_has_a_range_of_overhead(gpu: Gpu) -> None:
    found = device_overhead(gpu, plan())
    if not gpu.uses_torch_cuda:
        assert found.parts == ()
    else:
        assert 0 < found.low_bytes < found.high_bytes < 4 * GIB


def test_a_job_has_a_communicator_for_each_group_of_ranks() -> None:
    assert communicators(plan("ddp", "ddp", ranks=1)) == (0, 0)
    assert communicators(plan(ranks=1)) == (1, 1)
    assert communicators(plan("ddp", "ddp")) == (1, 1)
    assert communicators(plan(strategy="hsdp", ranks=16, nnodes=2)) == (2, 3)
    one, two = (device_overhead(find_gpu("H100"), plan("ddp", "ddp", ranks)) for ranks in (1, 2))
    assert {p.name for p in two.parts} - {p.name for p in one.parts} == {"NCCL kernels", "NCCL buffers"}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_colocated_vllm_that_is_awake_takes_its_share_of_every_gpu(gpu: Gpu) -> None:
    awake = Generation(completion_length=16, generator="colocate", memory_utilization=0.5)
    for generation, share in (
        (awake, ceil(gpu.memory_bytes / 2)),
        (replace(awake, sleeps=True), 0),
        (replace(awake, generator="server"), 0),
    ):
        found = device_overhead(gpu, replace(plan(), generation=generation))
        assert found.vllm_bytes == found.middle_bytes - device_overhead(gpu, plan()).middle_bytes == share


def test_more_nodes_take_more() -> None:
    one, two = (device_overhead(find_gpu("H100"), plan(ranks=16, nnodes=n)) for n in (1, 2))
    assert one.high_bytes < two.high_bytes
