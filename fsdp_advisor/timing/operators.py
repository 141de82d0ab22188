"""The time of operators on a GPU. That of matrix products depends on their shapes, that of flash attention on its FLOPs, and that of all
others on the bytes that they move.

Shapes: (M, K) x (K, N): M = rows of tokens, K = inner, N = columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import ceil, gcd, inf, prod
from typing import NamedTuple

from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.choices import Attention, Fp8
from fsdp_advisor.job.fp8 import suits_fp8
from fsdp_advisor.model.attention import WIDEST_FLASH_HEAD
from fsdp_advisor.model.profile import Unit
from fsdp_advisor.timing.achieved import (
    QUANTIZED_STATES_PER_S,
    SPLIT_K,
    TILES,
    WIDE_BACKWARD_FLOPS,
    WIDE_FORWARD_FLOPS,
    Achieved,
    achieved_by,
)


class Device(NamedTuple):
    """The rates that a GPU sustains at one precision.

    `achieved`: the shares of the datasheet's rates. `eager_bytes_per_s`: the memory rate of operators other than products and attention;
    `update_bytes_per_s`: that of the optimizer's step. `quantized_states_per_s`: values of bitsandbytes' 8-bit states that are updated.
    `fp32_matmul_flops`: the rate of products in fp32, whatever the precision.
    """

    achieved: Achieved
    matmul_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes_per_s: float
    eager_bytes_per_s: float
    update_bytes_per_s: float
    quantized_states_per_s: float
    multiprocessors: int
    element_bytes: int
    peak_flops: float
    fp8_flops: float | None = None
    fp32_matmul_flops: float | None = None

    @property
    def in_fp32(self) -> Device:
        """The same device for matrix products in fp32."""
        return self._replace(matmul_flops=self.fp32_matmul_flops or self.matmul_flops, element_bytes=4)


def device_of(gpu: Gpu, precision: str, attention: Attention = "sdpa", *, compiled: bool = False) -> Device | None:
    """The rates of `gpu` at `precision`; None if they are unknown. `compiled`: kernels that a compiler has fused."""
    achieved = achieved_by(gpu, attention)
    peak = _peak_flops(gpu, precision)
    if achieved is None or peak is None or gpu.memory_bytes_per_s is None or gpu.multiprocessors is None:
        return None
    update = achieved.update_16_bit if precision == "bf16" else achieved.update_32_bit
    return Device(
        achieved=achieved,
        matmul_flops=peak * (_matmul_share(gpu, precision, achieved)),
        attention_forward_flops=peak * achieved.attention_forward,
        attention_backward_flops=peak * achieved.attention_backward,
        memory_bytes_per_s=gpu.memory_bytes_per_s * achieved.memory,
        eager_bytes_per_s=gpu.memory_bytes_per_s * ((None if compiled else achieved.eager) or achieved.memory),
        update_bytes_per_s=gpu.memory_bytes_per_s * (update or achieved.memory),
        quantized_states_per_s=gpu.multiprocessors * QUANTIZED_STATES_PER_S,
        multiprocessors=gpu.multiprocessors,
        element_bytes=4 if precision == "fp32" else 2,
        peak_flops=peak,
        fp8_flops=gpu.fp8_flops * achieved.matmul * achieved.fp8_matmul if gpu.fp8_flops is not None else None,
        fp32_matmul_flops=None if gpu.fp32_flops is None else gpu.fp32_flops * _matmul_share(gpu, "fp32", achieved),
    )


def _matmul_share(gpu: Gpu, precision: str, achieved: Achieved) -> float:
    """The share of the datasheet's rate that matrix products reach. In fp32, products on NVIDIA use no tensor cores, and the
    datasheet's rate is that of the other cores; products on AMD use the matrix cores.
    """
    plain = precision == "fp32" and not (gpu.architecture or "").startswith("cdna")
    return achieved.plain_matmul if plain else achieved.matmul


def _peak_flops(gpu: Gpu, precision: str) -> float | None:
    """The datasheet's dense rate of the compute dtype. bf16 without bf16 tensor cores runs at the fp32 rate."""
    if precision == "fp32":
        return gpu.fp32_flops  # by default PyTorch does not use TF32 for matrix products
    if precision.startswith("fp16"):
        return gpu.fp16_flops
    return gpu.bf16_flops or gpu.fp32_flops


def tile_share(m: float, k: float, n: int, multiprocessors: int, products: int = 1) -> float:
    """The share of a GPU that an (m, n) output keeps busy. Tiles are whole, and so are waves over the multiprocessors.

    `products`: how many products run together (the experts of a grouped product). If there are fewer tiles than
    multiprocessors, several multiprocessors share a tile's inner dimension k. The best tile size of the kernels is used.
    Source: NVIDIA, Matrix Multiplication Background User's Guide, tile and wave quantization.
    >>> round(tile_share(256, 4096, 4096, 108), 2), round(tile_share(16384, 4096, 4096, 108), 2)
    (0.89, 1.0)
    """
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * products
        full = m * n * products / (tiles * rows * columns)
        if tiles < multiprocessors:
            tiles *= max(1, min(multiprocessors // tiles, int(k // SPLIT_K)))
        busy = full * tiles / (ceil(tiles / multiprocessors) * multiprocessors)
        best = max(best, rate * busy)
    return best


def product_s(
    m: float, k: float, n: int, device: Device, products: int = 1, *, in_fp8: bool = False, most_flops: float = inf
) -> float:
    """Seconds of one (m, k) x (k, n) product, or of `products` of them together: the longer of compute and memory traffic.

    `in_fp8`: the operands have one byte per element. Their casts are other operators. `most_flops`: the rate that misaligned rows allow.
    """
    flops = 2 * m * k * n * products
    read = (m * k + k * n) * (1 if in_fp8 else device.element_bytes)
    moved = (read + m * n * device.element_bytes) * products
    rate = device.fp8_flops if in_fp8 and device.fp8_flops is not None else device.matmul_flops
    if products > 1:
        rate *= device.achieved.grouped_matmul
    return max(
        flops / min(rate * tile_share(m, k, n, device.multiprocessors, products), most_flops),
        moved / device.memory_bytes_per_s,
    )


def misaligned_flops(k: int, n: int, device: Device) -> float:
    """The most FLOPs per second of products with an (n, k) weight whose rows are misaligned; infinite if rows are whole vectors of 16
    bytes.

    Tensor cores read rows in vectors. Rows of an odd number of elements are read one by one, those of an even number two by two.
    """
    share, together = device.achieved.misaligned_matmul, gcd(8, k, n)
    if share is None or device.element_bytes != 2 or together == 8:
        return inf
    return device.peak_flops * share * together


class Products(NamedTuple):
    """The matrix products of a unit's weights: (rows' share of the tokens, K, N, how many at once, whether the weight is
    trained). `in_8_bits`: (K, N) of bitsandbytes' weights in 8 bits, of whose products `shapes` has none.
    """

    shapes: tuple[tuple[float, int, int, int, bool], ...]
    in_8_bits: tuple[tuple[int, int], ...] = ()

    def flops(self, tokens: int) -> float:
        """FLOPs of one forward."""
        return sum(2 * tokens * share * k * n * count for share, k, n, count, _ in self.shapes)

    def rows_share(self, tokens: int, recorded_flops: int) -> float:
        """The share of the tokens that a weight sees, which is less than one if experts are separate matrices."""
        dense = sum(2 * tokens * k * n for _, k, n, count, _ in self.shapes if count == 1)
        routed = any(count > 1 for _, _, _, count, _ in self.shapes)
        fewer = not routed and 0 < recorded_flops < 0.9 * dense
        return recorded_flops / dense if fewer else 1.0


@lru_cache(maxsize=1024)
def products_of(unit: Unit, is_root: bool) -> Products:
    """The products of a unit. A layer uses every matrix weight once per token; the root only the head, its largest, last
    matrix.
    """
    weights = [(p.matrix or p.shape, p.trainable) for p in unit.parameters if p.dtype != "int8"]
    weights += [(b.matrix, False) for b in unit.buffers if b.matrix]
    matrices = [(shape, trained) for shape, trained in weights if len(shape) == 2 and min(shape) > 1]
    if is_root:
        largest = max(matrices, key=lambda matrix: matrix[0][0] * matrix[0][1], default=None)
        return Products(((1.0, largest[0][1], largest[0][0], 1, largest[1]),) if largest else ())
    shapes = [(1.0, shape[1], shape[0], 1, trained) for shape, trained in matrices]
    shapes += [(1.0 / s[0], s[2], s[1], s[0], trained) for s, trained in weights if len(s) == 3]
    return Products(tuple(shapes), tuple((p.shape[1], p.shape[0]) for p in unit.parameters if p.dtype == "int8"))


@lru_cache(maxsize=4096)
def matmul_s_per_flop(
    unit: Unit,
    is_root: bool,
    tokens: int,
    device: Device,
    recorded_flops: int,
    *,
    fp8: Fp8 = "none",
    unpacked: tuple[int, ...] = (),
) -> tuple[float, float]:
    """Seconds per FLOP of a unit's matrix products in forward and in backward, over the shapes of its weights.

    Backward has two products per weight: (M, N) x (N, K) for the input and, if the weight is trained, (N, M) x (M, K)
    for it. If a token uses several experts, or an expert sees few tokens, the experts' rows are scaled to match the
    recorded work. `fp8`: the recipe with which linear layers multiply in fp8 if their dimensions suit it.
    `unpacked`: bytes of the copies of weights in 8 bits by which backward multiplies. The FLOPs of their forward are not recorded:
    `work_in_8_bits`.
    """
    products = products_of(unit, is_root)
    if not (products.shapes and recorded_flops) and not products.in_8_bits:
        return 1 / device.matmul_flops, 1 / device.matmul_flops
    dense = sum(2 * tokens * k * n for _, k, n, count, _ in products.shapes if count == 1)
    routed = products.flops(tokens) - dense
    scale = max((recorded_flops - dense) / routed, 0.0) if routed else products.rows_share(tokens, recorded_flops)
    forward = backward = flops = backward_flops = 0.0
    for share, k, n, count, trained in products.shapes:
        m = tokens * share * (scale if count > 1 or not routed else 1.0)
        if not m:
            continue
        own = 2 * m * k * n * count
        flops, backward_flops = flops + own, backward_flops + own * (1 + trained)
        in_fp8 = fp8 != "none" and count == 1 and suits_fp8(n, k, fp8)
        most = misaligned_flops(k, n, device)
        forward += product_s(m, k, n, device, count, in_fp8=in_fp8, most_flops=most)
        backward += product_s(m, n, k, device, count, in_fp8=in_fp8, most_flops=most)
        backward += product_s(n, m, k, device, count, in_fp8=in_fp8, most_flops=most) if trained else 0.0
    rows = tokens * products.rows_share(tokens, recorded_flops)
    for k, n, of_weight in _multiplied_in_backward(products.in_8_bits, unpacked, device):
        backward += product_s(rows, n, k, of_weight)
        backward_flops += 2 * rows * k * n
    return forward / flops if flops else 0.0, backward / backward_flops if backward_flops else 0.0


def _multiplied_in_backward(
    weights: Iterable[tuple[int, int]], unpacked: tuple[int, ...], device: Device
) -> Iterator[tuple[int, int, Device]]:
    """(K, N, device at the copy's precision) of each weight in 8 bits by which backward multiplies.

    The copy of a weight has the dtype of the layer's input, which is often fp32, and autocast does not reach backward. Source:
    bitsandbytes 0.50.2, autograd/_functions.py, `MatMul8bitLt.backward`. Older recordings do not tell copies from other temporaries.
    """
    copies = Counter(unpacked)
    for k, n in sorted(weights, key=prod, reverse=True):
        size = 4 * k * n if copies[4 * k * n] else 2 * k * n
        if copies[size] or not unpacked:
            copies[size] -= 1
            yield k, n, device.in_fp32 if size == 4 * k * n else device


@lru_cache(maxsize=4096)
def work_in_8_bits(unit: Unit, tokens: int, device: Device, recorded_flops: int) -> tuple[float, float]:
    """FLOPs and seconds of a unit's products in 8 bits (LLM.int8) in forward. A tape has their traffic but not their FLOPs; the seconds
    are those by which their compute is longer than this traffic.

    They run at the rate in 16 bits, because the table of GPUs has no rates in int8. These are once to four times as high in datasheets.
    """
    products = products_of(unit, False)
    rows = tokens * products.rows_share(tokens, recorded_flops)
    flops = seconds = 0.0
    for k, n in products.in_8_bits:
        own, moved = 2 * rows * k * n, rows * k + k * n + 4 * rows * n  # the product is in int32
        compute = own / (device.matmul_flops * tile_share(rows, k, n, device.multiprocessors))
        flops += own
        seconds += max(compute - moved / device.eager_bytes_per_s, 0.0)
    return flops, seconds


def attention_s(
    flops: float, device: Device, head: int, tokens: int, *, causal: bool, backward: bool, masked: bool = False
) -> float:
    """Seconds of flash attention. A causal kernel skips half of the work, which `flops` includes; one with a mask skips nothing."""
    achieved = device.achieved
    rate = device.attention_backward_flops if backward else device.attention_forward_flops
    half_rate = achieved.half_rate_backward if backward else achieved.half_rate_forward
    rate *= (achieved.masked_backward if backward else achieved.masked_forward) if masked else 1.0
    rate *= (achieved.small_head if head <= 64 else 1.0) * tokens / (tokens + half_rate)
    if head > WIDEST_FLASH_HEAD:
        rate = min(rate, device.multiprocessors * (WIDE_BACKWARD_FLOPS if backward else WIDE_FORWARD_FLOPS))
    return flops * (0.5 if causal else 1.0) / rate


def batched_s(flops: float, device: Device, head: int) -> float:
    """Seconds of the batched matrix products of attention without a flash kernel. `head`: the head's width.

    A product of a (T, head) and a (head, T) matrix makes 2 x `head` FLOPs for each (T, T) element that it writes; the other
    products read as many elements.
    """
    moved = flops / head / 2 * device.element_bytes
    return max(flops / device.matmul_flops, moved / device.memory_bytes_per_s)
