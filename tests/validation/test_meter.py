"""The meter of tensor storages."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor._sharding_prop import ShardingPropagator  # after the check for torch

from fsdp_advisor.validation.meter import StorageMeter


def test_meter_ignores_tensors_of_dtensor_shape_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 makes unsharded ones in every step under fake tensors. Counted, FSDP2's optimizer step would be far too high."""
    name = "_propagate_tensor_meta_non_cached"
    monkeypatch.setattr(ShardingPropagator, name, lambda n: torch.empty(n, dtype=torch.uint8))
    with StorageMeter() as meter:
        kept = torch.empty(1000)
        tried = getattr(ShardingPropagator, name)(4096)
        assert (meter.live, meter.high) == (4096, 4096)
        again = tried.clone()
        assert (meter.live, len(kept), len(again)) == (8192, 1000, 4096)
    assert len(getattr(ShardingPropagator, name)(5)) == 5
