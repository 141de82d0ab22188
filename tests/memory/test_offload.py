"""Peaks on the GPU under parameter offload. The expected figures are from PyTorch's CUDA code, run without kernels (torch 2.13)."""

from __future__ import annotations

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import parse_bytes

BYTES = {"fp32": 4, "bf16": 2}


def offloaded(backend: str, strategy: str, precision: str, gpus: int = 8) -> StrategyEstimate:
    (one,) = estimate(
        model="meta-llama/Llama-3.2-1B", gpus=gpus, strategy=strategy, backend=backend, precision=precision, offload="parameters",
        gpu="H100", micro_batch_size=2, seq_len=1024,
    ).estimates  # fmt: skip
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp1_keeps_the_uploaded_shard_until_it_reshards(precision: str) -> None:
    """Until then the parameters are views of the shard that `flat_param_to` made. FSDP2 copies its shard and frees it."""
    by_fsdp1 = offloaded("fsdp1", "zero2", precision)
    by_fsdp2 = offloaded("fsdp2", "zero2", precision)
    shard = 1_235_814_400 * BYTES[precision] // 8
    more = by_fsdp1.peak_tensor_bytes - by_fsdp2.peak_tensor_bytes
    assert more == pytest.approx(shard, rel=0.06)  # the units' padding


@pytest.mark.parametrize(
    ("backend", "strategy", "precision", "allocated"),
    [
        ("fsdp1", "zero2", "fp32", "19190.1MiB"),
        ("fsdp1", "zero3", "fp32", "15260.8MiB"),
        ("fsdp1", "zero2", "bf16", "9151.3MiB"),
        ("fsdp1", "zero3", "bf16", "7193.7MiB"),
        ("fsdp1", "zero2", "bf16-mixed", "8856.7MiB"),
        ("fsdp1", "zero3", "bf16-mixed", "7116.6MiB"),
        ("fsdp2", "zero2", "fp32", "18585.0MiB"),
        ("fsdp2", "zero3", "fp32", "15104.8MiB"),
        ("fsdp2", "zero2", "bf16-mixed", "8855.7MiB"),
        ("fsdp2", "zero3", "bf16-mixed", "7116.6MiB"),
    ],
)
def test_allocated_bytes_match_the_allocator(backend: str, strategy: str, precision: str, allocated: str) -> None:
    found = parse_bytes(allocated)
    assert offloaded(backend, strategy, precision).peak_allocated_bytes == pytest.approx(found, rel=0.002)
