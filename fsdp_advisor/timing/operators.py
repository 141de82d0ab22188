"""How long a GPU takes for operators: matrix products by shape, flash attention, everything else by the bytes it moves.

Shapes: (M, K) x (K, N): M = rows of tokens, K = inner, N = columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from fsdp_advisor.hardware import Gpu
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.timing.achieved import (
    HALF_RATE_TOKENS,
    PLAIN_MATMUL,
    SMALL_HEAD,
    SPLIT_K,
    TILES,
    Achieved,
    achieved_by,
)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU at one precision: the rates it sustains."""

    matmul_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes_per_s: float
    multiprocessors: int
    element_bytes: int
    peak_flops: float


@lru_cache(maxsize=256)
def device_of(gpu: Gpu, precision: str) -> Device | None:
    """None where the GPU's rates are unknown."""
    achieved = achieved_by(gpu)
    peak = _peak_flops(gpu, precision)
    if achieved is None or peak is None or gpu.memory_bytes_per_s is None or gpu.multiprocessors is None:
        return None
    return Device(
        matmul_flops=peak * (_matmul_share(gpu, precision, achieved)),
        attention_forward_flops=peak * achieved.attention_forward,
        attention_backward_flops=peak * achieved.attention_backward,
        memory_bytes_per_s=gpu.memory_bytes_per_s * achieved.memory,
        multiprocessors=gpu.multiprocessors,
        element_bytes=4 if precision == "fp32" else 2,
        peak_flops=peak,
    )


def _matmul_share(gpu: Gpu, precision: str, achieved: Achieved) -> float:
    """On NVIDIA fp32 stays off the tensor cores; AMD's fp32 rate is its matrix cores'."""
    plain = precision == "fp32" and not (gpu.architecture or "").startswith("cdna")
    return PLAIN_MATMUL if plain else achieved.matmul


def _peak_flops(gpu: Gpu, precision: str) -> float | None:
    """The datasheet's dense rate of the dtype that computes. bf16 without tensor cores for it runs at the rate of fp32."""
    if precision == "fp32":
        return gpu.fp32_flops  # PyTorch keeps TF32 off for matrix products unless told otherwise
    if precision.startswith("fp16"):
        return gpu.fp16_flops
    return gpu.bf16_flops or gpu.fp32_flops


def tile_share(m: float, k: float, n: int, multiprocessors: int, products: int = 1) -> float:
    """How much of a GPU an (m, n) output keeps busy: whole tiles, in whole waves over the multiprocessors.

    `products` of them run together (the experts of a grouped product). Where there are fewer tiles than multiprocessors, the
    inner dimension k is split among several. The best of the kernels' tiles is taken.
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


def product_s(m: float, k: float, n: int, device: Device, products: int = 1) -> float:
    """One (m, k) x (k, n) product, or `products` of them at once: compute or operands' bytes, whichever takes longer."""
    flops = 2 * m * k * n * products
    moved = (m * k + k * n + m * n) * device.element_bytes * products
    return max(
        flops / (device.matmul_flops * tile_share(m, k, n, device.multiprocessors, products)),
        moved / device.memory_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of a unit's weights: (rows' share of the tokens, K, N, how many at once)."""

    shapes: tuple[tuple[float, int, int, int], ...]

    def flops(self, tokens: int) -> float:
        """Of one forward."""
        return sum(2 * tokens * share * k * n * count for share, k, n, count in self.shapes)


@lru_cache(maxsize=1024)
def products_of(unit: Unit, is_root: bool) -> Products:
    """Every matrix weight of a layer is used once on every token; of the root only the head is (its largest, last matrix)."""
    matrices = [p.shape for p in unit.parameters if len(p.shape) == 2 and min(p.shape) > 1]
    if is_root:
        largest = max(matrices, key=lambda shape: shape[0] * shape[1], default=None)
        return Products(((1.0, largest[1], largest[0], 1),) if largest else ())
    experts = [p.shape for p in unit.parameters if len(p.shape) == 3]
    shapes = [(1.0, shape[1], shape[0], 1) for shape in matrices]
    shapes += [(1.0 / shape[0], shape[2], shape[1], shape[0]) for shape in experts]
    return Products(tuple(shapes))


@lru_cache(maxsize=4096)
def matmul_s_per_flop(
    unit: Unit, is_root: bool, tokens: int, device: Device, recorded_flops: int
) -> tuple[float, float]:
    """Seconds per FLOP of a unit's matrix products in forward and in backward, over the shapes of its weights.

    Backward has two products per weight: (M, N) x (N, K) for the input and (N, M) x (M, K) for the weight. Where the recorded
    work is that of several experts per token, or of few tokens per expert, the experts' rows are scaled to meet it.
    """
    products = products_of(unit, is_root)
    if not products.shapes or not recorded_flops:
        return 1 / device.matmul_flops, 1 / device.matmul_flops
    dense = sum(2 * tokens * k * n for _, k, n, count in products.shapes if count == 1)
    routed = products.flops(tokens) - dense
    scale = max((recorded_flops - dense) / routed, 0.0) if routed else 1.0
    if not routed and recorded_flops < 0.9 * dense:  # experts kept as separate matrices: each sees part of the tokens
        scale = recorded_flops / dense
    forward = backward = flops = 0.0
    for share, k, n, count in products.shapes:
        m = tokens * share * (scale if count > 1 or not routed else 1.0)
        if not m:
            continue
        flops += 2 * m * k * n * count
        forward += product_s(m, k, n, device, count)
        backward += product_s(m, n, k, device, count) + product_s(n, m, k, device, count)
    return forward / flops, backward / (2 * flops)


def head_dim(profile: Profile) -> int:
    """Of one attention head, as the configuration says; 128 where it does not."""
    config = profile.config
    for name in ("head_dim", "d_kv"):
        if isinstance(own := config.get(name), int):
            return own
    width = config.get("hidden_size", config.get("n_embd", config.get("d_model")))
    heads = config.get("num_attention_heads", config.get("n_head", config.get("num_heads", config.get("n_heads"))))
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 128


def attention_s(flops: float, device: Device, head: int, tokens: int, *, causal: bool, backward: bool) -> float:
    """Flash attention; a causal kernel skips the masked half, which the recorded work counts."""
    rate = device.attention_backward_flops if backward else device.attention_forward_flops
    rate *= (SMALL_HEAD if head <= 64 else 1.0) * tokens / (tokens + HALF_RATE_TOKENS)
    return flops * (0.5 if causal else 1.0) / rate


def batched_s(flops: float, device: Device, head: int) -> float:
    """Attention's own products where no flash kernel does them: each (T, T) element is written or read once per `head` products."""
    moved = flops / head / 2 * device.element_bytes
    return max(flops / device.matmul_flops, moved / device.memory_bytes_per_s)
