"""Operators on the roofline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Fp8
from fsdp_advisor.model.profile import Parameter, Unit
from fsdp_advisor.timing.operators import (
    attention_s,
    device_of,
    matmul_s_per_flop,
    product_s,
    products_of,
    tile_share,
    work_in_8_bits,
)

A100 = device_of(find_gpu("A100"), "bf16-mixed")
assert A100 is not None


def test_a_large_product_runs_at_the_sustained_rate() -> None:
    flops = 2 * 16384 * 4096 * 4096
    assert flops / product_s(16384, 4096, 4096, A100) == pytest.approx(A100.matmul_flops, rel=0.05)


def test_a_large_product_in_fp8_runs_at_nine_tenths_of_twice_the_rate() -> None:
    h100 = device_of(find_gpu("H100"), "bf16-mixed")
    assert h100 is not None
    large = (16384, 4096, 4096, h100)
    assert product_s(*large, in_fp8=True) == pytest.approx(product_s(*large) / (2 * 0.9))


def test_only_linear_layers_that_suit_fp8_are_faster_in_it() -> None:
    h100 = device_of(find_gpu("H100"), "bf16-mixed")
    assert h100 is not None
    recipes: tuple[Fp8, ...] = ("tensorwise", "rowwise", "mxfp8")
    for width, suits in ((4096, recipes), (4080, recipes[:2]), (4088, ())):
        unit = Unit("Layer", (Parameter("weight", (4096, width)),))
        flops = 2 * 16384 * 4096 * width
        bf16 = matmul_s_per_flop(unit, False, 16384, h100, flops)[0]
        for recipe in recipes:
            share = 1 / (2 * 0.9) if recipe in suits else 1.0
            fp8 = matmul_s_per_flop(unit, False, 16384, h100, flops, fp8=recipe)[0]
            assert fp8 == pytest.approx(share * bf16)


def test_a_thin_product_is_bound_by_its_weight() -> None:
    """To the tile's waste: cuBLAS has other kernels for a single row."""
    weight = 2 * 4096 * 4096 / A100.memory_bytes_per_s
    assert weight < product_s(8, 4096, 4096, A100) < 1.25 * weight


@given(st.integers(1, 20000), st.integers(64, 20000), st.integers(64, 20000))
def test_no_product_beats_the_roofline(m: int, k: int, n: int) -> None:
    seconds = product_s(m, k, n, A100)
    assert seconds >= 2 * m * k * n / A100.matmul_flops * (1 - 1e-9)
    assert seconds >= 2 * (m * k + k * n + m * n) / A100.memory_bytes_per_s * (1 - 1e-9)
    assert 0 < tile_share(m, k, n, 108) <= 1


def test_a_last_wave_that_is_not_full_costs_a_whole_one() -> None:
    full = 108 * 128  # tiles of 256 rows for every multiprocessor once
    assert tile_share(256, 4096, full, 108) == 1
    assert tile_share(256, 4096, full + 128, 108) < 0.96


def test_experts_see_the_tokens_that_are_routed_to_them() -> None:
    experts, hidden, width, tokens = 8, 1024, 4096, 4096
    unit = Unit("Moe", (Parameter("experts", (experts, width, hidden)), Parameter("gate", (experts, hidden))))
    dense = 2 * tokens * hidden * experts
    routed = 2 * (2 * tokens * hidden * width)  # two experts per token
    forward, _ = matmul_s_per_flop(unit, False, tokens, A100, dense + routed)
    per_expert = 8 * product_s(tokens * 2 / 8, hidden, width, A100) / routed
    assert forward == pytest.approx(per_expert, rel=0.25)
    assert products_of(unit, False).shapes[-1] == (1 / 8, hidden, width, 8, True)


EIGHT_BIT_LAYER = Unit("Layer", (Parameter("weight", (4096, 8192), role="quantized", dtype="int8", trainable=False),))


def test_forward_in_8_bits_has_the_flops_of_its_weight_at_the_rate_of_16_bits() -> None:
    flops, seconds = work_in_8_bits(EIGHT_BIT_LAYER, 16384, A100, 0)
    assert flops == 2 * 16384 * 4096 * 8192
    traffic = (16384 * 8192 + 4096 * 8192 + 4 * 16384 * 4096) / A100.eager_bytes_per_s
    assert seconds + traffic == pytest.approx(product_s(16384, 8192, 4096, A100))


@pytest.mark.parametrize(("element_bytes", "rate"), [(4, A100.fp32_matmul_flops), (2, A100.matmul_flops)])
def test_backward_of_8_bits_multiplies_in_the_dtype_of_the_weights_copy(element_bytes: int, rate: float) -> None:
    copies = (element_bytes * 4096 * 8192,)
    _, backward = matmul_s_per_flop(EIGHT_BIT_LAYER, False, 16384, A100, 0, unpacked=copies)
    assert 1 / backward == pytest.approx(rate, rel=0.05)


def test_a_causal_kernel_skips_half() -> None:
    whole, half = (attention_s(1e12, A100, 128, 2048, causal=causal, backward=False) for causal in (False, True))
    assert half == whole / 2


@pytest.mark.parametrize(("tokens", "published"), [(1024, 260e12), (2048, 298e12), (4096, 319e12), (16384, 335e12)])
def test_flash_attention_ramps_up_as_published(tokens: int, published: float) -> None:
    """FlashAttention-2 on H100, causal, head 128: FlashAttention-3 (arXiv:2407.08608), figure 5."""
    h100 = device_of(find_gpu("H100"), "bf16", "flash_attention_2")
    assert h100 is not None
    counted_whole = 2e12
    assert counted_whole / 2 / attention_s(
        counted_whole, h100, 128, tokens, causal=True, backward=False
    ) == pytest.approx(published, rel=0.04)


def test_a_multiprocessor_of_blackwell_runs_flash_attention_2_as_fast_as_one_of_hopper() -> None:
    def rate_of_one(name: str, *, backward: bool) -> float:
        gpu = find_gpu(name)
        device = device_of(gpu, "bf16", "flash_attention_2")
        assert device is not None and gpu.multiprocessors is not None
        return 1 / attention_s(1e12, device, 128, 16384, causal=False, backward=backward) / gpu.multiprocessors

    for backward in (False, True):
        assert rate_of_one("B200", backward=backward) == pytest.approx(rate_of_one("H100", backward=backward), rel=0.03)


def test_old_gpus_compute_bf16_without_tensor_cores() -> None:
    v100 = find_gpu("V100")
    bf16, fp16 = device_of(v100, "bf16"), device_of(v100, "fp16-mixed")
    assert bf16 is not None and fp16 is not None
    assert bf16.peak_flops == v100.fp32_flops and fp16.peak_flops == v100.fp16_flops


SUCCESSORS = (
    ("RTX-4090", "RTX-5090"), ("RTX-4080", "RTX-5080"), ("RTX-4070-Ti", "RTX-5070-Ti"), ("RTX-4060-Ti-16GB", "RTX-5060-Ti-16GB"),
    ("RTX-6000-Ada", "RTX-PRO-6000"), ("RTX-6000-Ada", "RTX-PRO-6000-Max-Q"), ("L40S", "RTX-PRO-6000-Server"),
    ("H100-80GB", "H200"), ("H200", "B200"), ("H200", "GB200"), ("B200", "B300"),
)  # fmt: skip
"""Boards and those that replaced them, with more multiprocessors and faster memory."""


@pytest.mark.parametrize(("older", "newer"), SUCCESSORS)
def test_products_and_attention_are_no_slower_on_a_boards_successor(older: str, newer: str) -> None:
    """Large products, and attention over usual lengths. In fp32 flash attention does not run."""
    for precision in ("bf16", "fp32"):
        before, after = (device_of(find_gpu(name), precision) for name in (older, newer))
        assert before is not None
        assert after is not None
        assert after.matmul_flops >= before.matmul_flops
        if precision == "fp32":
            continue
        for tokens in (512, 2048, 32768):
            for backward in (False, True):
                slower, faster = (
                    attention_s(1e12, device, 128, tokens, causal=True, backward=backward) for device in (before, after)
                )
                assert faster <= slower


def test_products_of_b200_are_below_the_best_benchmark_by_as_much_as_those_of_h100() -> None:
    """H100 0.80 and B200 0.78 of the peak: Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS."""
    b200, h100 = (device_of(find_gpu(name), "bf16") for name in ("B200", "H100"))
    assert b200 is not None and h100 is not None
    share = b200.matmul_flops / b200.peak_flops / 0.78
    assert share == pytest.approx(h100.matmul_flops / h100.peak_flops / 0.80, rel=0.02)


def test_operators_of_b200_take_as_long_as_those_of_a_published_profile() -> None:
    """Element-wise kernels of Qwen3.5-9B: 296 ms, for 1.03 to 1.16 TB (huggingface/transformers pull 48692)."""
    b200 = device_of(find_gpu("B200"), "bf16")
    assert b200 is not None
    assert 1.03e12 / b200.eager_bytes_per_s < 0.296 < 1.16e12 / b200.eager_bytes_per_s


@pytest.mark.parametrize(
    ("gpu", "precision", "measured"),
    [
        ("RTX-5090", "bf16", (182, 235, 240)), ("RTX-5080", "bf16", (91, 103, 102)), ("RTX-5070", "bf16", (64, 67, 67)),
        ("RTX-5060-Ti-16GB", "bf16", (46, 46, 47)), ("RTX-5090", "fp32", (64, 66, 65)), ("RTX-5080", "fp32", (32, 33, 33)),
        ("RTX-PRO-6000", "bf16", (368, 350, 334)),
    ],
)  # fmt: skip
def test_products_on_geforce_boards_are_near_the_measured_ones(
    gpu: str, precision: str, measured: tuple[int, ...]
) -> None:
    """TFLOP/s of square products of 4096, 8192 and 10240, from the sources in `timing/achieved.py`."""
    device = device_of(find_gpu(gpu), precision)
    assert device is not None
    assert device.matmul_flops / 1e12 == pytest.approx(sum(measured) / 3, rel=0.12)
