"""The lines that add FSDP1 to a script shard as the plan does: PyTorch runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from export_jobs import RANKS, job, plan

from fsdp_advisor.export import find
from fsdp_advisor.export.bundle import bundle

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


class LlamaDecoderLayer(torch.nn.Linear):
    """A layer with the name that the lines wrap."""


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "nnodes", "reshard", "sharding"),
    [
        ("zero2", 1, "auto", "SHARD_GRAD_OP"),
        ("zero3", 2, "auto", "FULL_SHARD"),
        ("hsdp", 1, "auto", "HYBRID_SHARD"),
        ("hsdp", 1, "false", "_HYBRID_SHARD_ZERO2"),
        ("hsdp", 2, "auto", "HYBRID_SHARD"),
        ("hsdp", 2, "false", "_HYBRID_SHARD_ZERO2"),
    ],
)
@pytest.mark.parametrize("prefetches", [True, False])
def test_pytorch_shards_as_the_plan(
    strategy: str, nnodes: int, reshard: str, sharding: str, prefetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh",
        lambda device, *args, **options: init_device_mesh("cpu", *args, **options),
    )
    of = plan(strategy, "fsdp1", nnodes, reshard_after_forward=reshard, forward_prefetch=prefetches)
    (text,) = (f.text for f in bundle(find("torchrun"), job(of)).files if f.name == "lines_to_add.py")
    lines: dict[str, object] = {}
    exec(compile(text, "lines_to_add.py", "exec"), lines)
    shard = lines["shard"]
    assert callable(shard)
    found = shard(torch.nn.Sequential(LlamaDecoderLayer(8, 8), LlamaDecoderLayer(8, 8)))
    assert isinstance(found, FullyShardedDataParallel)
    assert (found.sharding_strategy.name, found.forward_prefetch) == (sharding, prefetches)
    assert found.process_group.size() == of.shard_degree
