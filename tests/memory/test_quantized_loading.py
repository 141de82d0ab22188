"""Loading and offloading a base that bitsandbytes quantizes."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import in_turn

import fsdp_advisor
from fsdp_advisor.model.checkpoint_dtypes import dtype_of
from fsdp_advisor.strategy_estimate import StrategyEstimate

WHOLE = 5_604_000_000
"""Bytes of Llama-3.1-8B on a GPU: weights of 4 bits, scales, embedding and head in bf16, adapters."""


def qlora(gpus: int, **options: Any) -> StrategyEstimate:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpu": "A100-40GB", "framework": "trl", "use_peft": True}
    quantized = {} if "load_in_8bit" in options else {"load_in_4bit": True}
    return fsdp_advisor.estimate(gpus=gpus, **{"strategy": "zero3", **job, **quantized, **options}).estimates[0]


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed"])
def test_every_rank_quantizes_the_whole_base_on_its_gpu(backend: str, storage: str) -> None:
    strategy = "ddp" if backend == "ddp" else "zero3"
    row = qlora(8, strategy=strategy, backend=backend, bnb_4bit_quant_storage=storage)
    assert row.job_peaks is not None
    load = row.job_peaks.load_method
    assert load.way == "device_map"
    assert load.gpu_bytes > WHOLE
    assert load.host_bytes_per_node == 0


def test_a_weight_of_unknown_dtype_counts_as_converted_before_it_is_quantized() -> None:
    assert dtype_of("Qwen/Qwen2.5-0.5B") is None
    row = qlora(8, model="Qwen/Qwen2.5-0.5B", strategy="ddp")
    assert row.job_peaks is not None
    assert row.job_peaks.load_method.host_bytes_per_node == 8 * 2 * 151936 * 896


def test_accelerate_keeps_the_whole_base_until_fsdp2_has_sharded_all_units() -> None:
    """A rehearsal of TRL with six layers on two GPUs: 161.5 MB, where the whole base has 108.7 MB."""
    needed = []
    for gpus in (2, 4):
        row = qlora(gpus, backend="fsdp2", bnb_4bit_quant_storage="bfloat16")
        assert row.job_peaks is not None
        needed.append(row.job_peaks.load_method.gpu_bytes)
    assert needed[0] - needed[1] == pytest.approx(WHOLE / 2 - WHOLE / 4, rel=0.001)


@in_turn(1, of=2)
def test_fsdp1_flattens_a_base_that_is_whole_on_the_gpu() -> None:
    row = qlora(8, backend="fsdp1", bnb_4bit_quant_storage="bfloat16")
    assert row.job_peaks is not None
    assert row.job_peaks.load_method.way == "device_map"
    assert WHOLE < row.job_peaks.load_method.gpu_bytes < 1.2 * WHOLE


@in_turn(1, of=2)
def test_a_base_in_8_bits_comes_back_to_the_host_weight_by_weight() -> None:
    row = qlora(8, load_in_8bit=True, strategy="ddp")
    assert row.job_peaks is not None
    assert row.job_peaks.load_method.host_bytes_per_node == 8 * 4 * 14336 * 4096


def test_a_base_that_fsdp_shards_is_loaded_on_the_host_for_a_small_gpu() -> None:
    """FSDP2 leaves packed weights in uint8 on the host, because it does not shard them."""
    row = qlora(8, gpu="5GiB", bnb_4bit_quant_storage="bfloat16")
    assert row.job_peaks is not None
    assert [m.way for m in row.job_peaks.load_methods] == ["device_map", "every_rank"]
    assert row.job_peaks.load_method.way == "every_rank"
    whole = qlora(8, gpu="5GiB", bnb_4bit_quant_storage="uint8")
    assert whole.job_peaks is not None
    assert [m.way for m in whole.job_peaks.load_methods] == ["device_map"]


def test_a_script_quantizes_on_the_host_unless_the_host_is_too_small() -> None:
    """As the exported script for the Trainer does, so that no GPU ever has the whole base."""
    options = {"framework": "trainer", "backend": "fsdp2", "bnb_4bit_quant_storage": "bfloat16"}
    usual, on_small_host = qlora(8, **options), qlora(8, **options, host_memory="16GiB")
    assert usual.job_peaks is not None and on_small_host.job_peaks is not None
    assert usual.job_peaks.load_method.way == "every_rank"
    assert usual.job_peaks.load_method.gpu_bytes < WHOLE
    assert on_small_host.fits and on_small_host.job_peaks.load_method.way == "device_map"


def test_a_host_of_128_gib_is_large_enough_to_load_8b_in_4_bits() -> None:
    assert qlora(8, host_memory="128GiB").fits


@pytest.mark.parametrize("gpus", [2, 4])
def test_offload_keeps_unsharded_packed_weights_on_the_gpu_only(gpus: int) -> None:
    """The host has shards of the other weights, and of the adapters with gradients and two moments."""
    row = qlora(gpus, offload="parameters")
    assert row.states["parameters"] == 3_489_660_928
    others, adapters = 2 * (2 * 128256 * 4096 + 65 * 4096), 2 * 6_815_744
    assert row.host_bytes_per_node == pytest.approx(others + 4 * adapters, rel=1e-6)
