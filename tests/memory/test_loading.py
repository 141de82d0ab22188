"""Loading: real runs in two processes, and what every way has in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import RANKS, llama, run_ranks

from fsdp_advisor.engines.loading import advised, loadings
from fsdp_advisor.engines.transfer import Loading, checkpoint_element_bytes, one_copy_bytes
from fsdp_advisor.job.plan import OFFLOADS, Plan

GIB = 2**30
SMALL = (512, 1376, 4, 16001)
CASES = (
    "every_rank", "every_rank_mapped", "cpu_ram_efficient_loading", "fsdp2_rank0", "fsdp2_sharded", "fsdp2_every_rank",
    "fsdp2_scattered", "fsdp1_rank0", "fsdp1_without_device_id",
)  # fmt: skip
LLAMA_7B = llama(4096, 11008, 32, 32000)


def plan(backend: str, strategy: str = "zero3", ranks: int = RANKS, **options: Any) -> Plan:
    shards, replicas = (1, ranks) if strategy == "ddp" else (ranks, 1)
    return Plan(strategy=strategy, backend=backend, shard_degree=shards, replica_degree=replicas, seq_len=1, **options)


def way(profile: Any, job: Plan, name: str) -> Loading:
    return next(w for w in loadings(profile, job) if w.way == name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: what each case took of the host, from its own beginning."""
    folder = tmp_path_factory.mktemp("loading")
    run_ranks(Path(__file__).parent / "checkpoint_worker.py", str(folder), *CASES)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def near(n_bytes: int) -> Any:
    return pytest.approx(n_bytes, rel=0.05)


def test_from_pretrained_with_another_dtype_is_a_copy_per_rank(measured: list[dict[str, Any]]) -> None:
    """Also under accelerate's cpu_ram_efficient_loading, which transformers 5 does not honour."""
    profile = llama(*SMALL)
    for case, name in (("every_rank", "every_rank"), ("cpu_ram_efficient_loading", "cpu_ram_efficient_loading")):
        predicted = way(profile, plan("fsdp2"), name)
        assert measured[0][case]["high_bytes"] == near(predicted.first_rank_host_bytes)
        assert measured[1][case]["high_bytes"] == near(predicted.other_ranks_host_bytes)


def test_from_pretrained_with_the_checkpoints_dtype_maps_the_file(measured: list[dict[str, Any]]) -> None:
    profile = llama(*SMALL, config={"dtype": "bfloat16"})
    predicted = way(profile, plan("fsdp2", precision="bf16"), "every_rank")
    assert predicted.host_bytes_per_node == 0
    for rank in measured:
        assert rank["every_rank_mapped"]["high_bytes"] < 0.01 * one_copy_bytes(profile, plan("fsdp2"))
        assert rank["every_rank_mapped"]["file_bytes"] == near(predicted.mapped_bytes or 0)


def test_fsdp1_on_the_cpu(measured: list[dict[str, Any]]) -> None:
    predicted = way(llama(*SMALL), plan("fsdp1"), "every_rank_without_device_id")
    for rank in measured:
        assert rank["fsdp1_without_device_id"]["high_bytes"] == near(predicted.first_rank_host_bytes)


def test_fsdp1_unit_by_unit(measured: list[dict[str, Any]]) -> None:
    """Exactly, but for the model's buffers and a handful of small tensors: rank 1 makes each unit where it wraps it."""
    predicted = way(llama(*SMALL), plan("fsdp1"), "rank0")
    assert measured[1]["fsdp1_rank0"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)
    assert predicted.other_ranks_host_bytes == 0


def test_fsdp2_from_rank_0(measured: list[dict[str, Any]]) -> None:
    """On the CPU the device's memory is the host's: rank 0 has both, its own copy standing for the one sent."""
    predicted = way(llama(*SMALL), plan("fsdp2"), "rank0")
    shards = way(llama(*SMALL), plan("fsdp2"), "sharded").gpu_bytes
    assert measured[1]["fsdp2_rank0"]["high_bytes"] == near(predicted.gpu_bytes)
    assert measured[0]["fsdp2_rank0"]["high_bytes"] == near(predicted.first_rank_host_bytes + shards)


def test_fsdp2_from_the_file_by_every_rank(measured: list[dict[str, Any]]) -> None:
    """Each rank reads its rows out of the mapped file and has nothing but its shards."""
    predicted = way(llama(*SMALL), plan("fsdp2"), "sharded")
    for rank in measured:
        assert rank["fsdp2_sharded"]["high_bytes"] == near(predicted.gpu_bytes)


def test_fsdp2_unit_by_unit(measured: list[dict[str, Any]]) -> None:
    predicted = way(llama(*SMALL), plan("fsdp2"), "every_rank")
    for rank in measured:
        assert rank["fsdp2_every_rank"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)


def test_fsdp2_tensor_by_tensor(measured: list[dict[str, Any]]) -> None:
    """accelerate's way, rank 0's side, but for buffers: 16001 rows for two ranks, so that the last chunk is padded."""
    predicted = way(llama(*SMALL), plan("fsdp2", framework="accelerate"), "cpu_ram_efficient_loading")
    assert measured[0]["fsdp2_scattered"]["device_bytes"] == pytest.approx(predicted.gpu_bytes, rel=1e-4)


def test_a_tied_tensor_is_sent_under_each_of_its_names() -> None:
    job = plan("fsdp2", ranks=8, framework="accelerate")
    tied = way(llama(4096, 11008, 32, 32000, tied=True), job, "cpu_ram_efficient_loading")
    whole = 4 * 4096 * 32000
    shards = sum(one.kept.rounded for unit in tied.placed for one in unit)
    assert tied.gpu_bytes == shards + whole + whole // 8


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_accelerate_leaves_fewer_ways(framework: str) -> None:
    ways = {b: [w.way for w in loadings(LLAMA_7B, plan(b, framework=framework))] for b in ("fsdp1", "fsdp2")}
    assert ways["fsdp1"] == ["every_rank", "rank0", "cpu_ram_efficient_loading"]
    assert ways["fsdp2"] == ["every_rank", "cpu_ram_efficient_loading"]


def test_one_unit_for_all_is_moved_at_once() -> None:
    """`--wrap none`: there is nothing to wrap before the root."""
    copy = one_copy_bytes(LLAMA_7B, plan("fsdp2", ranks=8))
    assert way(LLAMA_7B, plan("fsdp2", ranks=8, wrap="none"), "every_rank").gpu_bytes > copy
    assert way(LLAMA_7B, plan("fsdp2", ranks=8), "every_rank").gpu_bytes < copy / 4


def every_plan(ranks: int) -> list[Plan]:
    return [
        plan(backend, strategy, ranks, offload=offload)
        for offload, strategies in OFFLOADS.items()
        for strategy, backends in strategies.items()
        for backend in backends
    ]


@pytest.mark.parametrize("job", every_plan(8), ids=lambda p: f"{p.strategy}-{p.backend}-{p.offload}")
def test_every_plan_can_be_loaded(job: Plan) -> None:
    ways = loadings(LLAMA_7B, job)
    assert len({w.way for w in ways}) == len(ways) > 0
    for w in ways:
        assert w.gpu_bytes >= 0
        assert w.host_bytes_per_node == w.first_rank_host_bytes + 7 * w.other_ranks_host_bytes


def test_a_7b_model_on_eight_gpus() -> None:
    """The question of a user whose 7B job died inside `FSDP(model)` on 24 GB GPUs: one unit for all needs the whole model."""
    copy = one_copy_bytes(LLAMA_7B, plan("fsdp1"))
    every = way(LLAMA_7B, plan("fsdp1", ranks=8), "every_rank")
    assert every.host_bytes_per_node == 8 * copy
    assert copy / 8 < every.gpu_bytes < 24 * GIB
    root = llama(4096, 11008, 32, 32000).root
    layers = tuple(p for layer in LLAMA_7B.layers() for p in layer.parameters)
    unwrapped = llama(4096, 11008, 0, 32000)
    object.__setattr__(unwrapped, "root", type(root)(root.kind, (*layers, *root.parameters)))
    assert way(unwrapped, plan("fsdp1", ranks=8), "every_rank").gpu_bytes > 48 * GIB


def test_what_is_advised() -> None:
    """The first way that fits; the one with least on the host where the node's memory is unknown."""
    ways = loadings(LLAMA_7B, plan("fsdp1", ranks=8))
    assert advised(ways, host_memory_bytes=1024 * GIB).way == "every_rank"
    assert advised(ways, host_memory_bytes=64 * GIB).way == "rank0"
    assert advised(ways).way == "rank0"
    tight = loadings(LLAMA_7B, plan("fsdp1", ranks=8))
    assert advised(tight, gpu_memory_bytes=4 * GIB).way == "every_rank_without_device_id"


def test_the_checkpoints_dtype() -> None:
    assert checkpoint_element_bytes(llama(*SMALL, config={"torch_dtype": "float16"})) == 2
    assert checkpoint_element_bytes(llama(*SMALL, config={"dtype": "float32"})) == 4
    assert checkpoint_element_bytes(llama(*SMALL)) is None
    unknown = way(llama(*SMALL), plan("fsdp2"), "every_rank")
    assert unknown.mapped_bytes is None
    assert unknown.first_rank_host_bytes == one_copy_bytes(llama(*SMALL), plan("fsdp2"))


def test_zero3_without_zero_init_moves_the_whole_model() -> None:
    big = llama(8192, 28672, 80, 32000)
    job = plan("deepspeed", ranks=64)
    assert way(big, job, "every_rank").gpu_bytes > 120 * GIB
    assert way(big, job, "zero_init").gpu_bytes < 24 * GIB


def test_ddp_makes_its_buckets_while_it_is_built() -> None:
    job = plan("ddp", "ddp", 4)
    assert way(LLAMA_7B, job, "every_rank").gpu_bytes == pytest.approx(2 * one_copy_bytes(LLAMA_7B, job), rel=1e-3)
    alone = plan("ddp", "ddp", 1)
    assert way(LLAMA_7B, alone, "every_rank").gpu_bytes == pytest.approx(one_copy_bytes(LLAMA_7B, alone), rel=1e-3)
