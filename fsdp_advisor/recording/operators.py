"""The work of one operator: floating-point operations and memory traffic, from the shapes of its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_advisor.recording.storages import tensors_in


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one or more operators. `traffic_bytes`: read and written by operators other than matrix products and
    attention. bitsandbytes' products in 8 bits have traffic alone: the time model knows their FLOPs from the weights' shapes.
    """

    matmul_flops: int = 0
    attention_flops: int = 0
    traffic_bytes: int = 0
    operators: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.operators + other.operators,
        )


NONE = Work()


_FORWARD, _BACKWARD = (0, 2, 2), (1, 3, 5)
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _FORWARD,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _BACKWARD,
    "aten::_scaled_dot_product_flash_attention": _FORWARD,  # this and the next ones: Inductor's code calls them
    "aten::_scaled_dot_product_flash_attention_backward": _BACKWARD,
    "aten::_scaled_dot_product_efficient_attention": _FORWARD,
    "aten::_scaled_dot_product_efficient_attention_backward": _BACKWARD,
    "aten::_scaled_dot_product_cudnn_attention": _FORWARD,
    "aten::_scaled_dot_product_cudnn_attention_backward": _BACKWARD,
    "fsdp_advisor::efficient_attention": _FORWARD,
    "fsdp_advisor::efficient_attention_backward": _BACKWARD,
}
"""Operator -> positions of query and value among its arguments, of shape (B, H, T, D), and the number of matrix products."""

_TOKENS_FIRST = {
    "fsdp_advisor::flash_attention": (0, 2, 2),
    "fsdp_advisor::flash_attention_backward": (1, 3, 5),
    "fsdp_advisor::compiled_flash_backward": (1, 3, 5),
}
"""The same of operators whose tensors have the shape (B, T, H, D)."""

_VARLEN = {
    "fsdp_advisor::flash_varlen": (0, 2, 3, 2),
    "fsdp_advisor::flash_varlen_backward": (1, 3, 6, 5),
    "fsdp_advisor::compiled_flash_varlen_backward": (1, 3, 6, 5),
}
"""Operator -> positions of query, value and the number of sequences, and the number of matrix products."""


def _attention_flops(query: torch.Tensor, value: torch.Tensor, products: int) -> int:
    """FLOPs of attention: 2 B H T S D for each of `products` matrix products over (B, H, T, S, D). Masked halves count too.

    Forward has two (QK^T, PV), backward five (QK^T again, dV, dP, dQ, dK). Source: torch.utils.flop_counter.sdpa_flop_count.
    """
    b, h, t, d = query.shape
    return products * 2 * b * h * t * value.shape[2] * d


def _varlen_flops(query: torch.Tensor, value: torch.Tensor, sequences: int, products: int) -> int:
    """`_attention_flops` of `sequences` equally long sequences in one row; tensors have shape (tokens, H, D)."""
    tokens, h, d = query.shape
    return products * 2 * h * tokens * value.shape[0] * d // sequences


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """The work of one operator. Views cost nothing."""
    known = _work_by_name(func._schema.name, args)
    if known is not None:
        return known
    if (count := flop_registry.get(func._overloadpacket)) is not None:
        return Work(matmul_flops=int(count(*args, **kwargs, out_val=result)), operators=1)
    inputs = {t.untyped_storage()._cdata: t for t in tensors_in((*args, *kwargs.values()))}
    outputs = tensors_in(result)
    is_view = not func._schema.is_mutable and all(o.untyped_storage()._cdata in inputs for o in outputs)
    if not outputs or is_view:
        return NONE
    return Work(traffic_bytes=_n_bytes(inputs.values()) + _n_bytes(outputs), operators=1)


def _work_by_name(name: str, args: tuple[Any, ...]) -> Work | None:
    """The work of attention and of operators that a recording defines; None for other operators."""
    if name in _ATTENTION:
        query, value, products = _ATTENTION[name]
        return Work(attention_flops=_attention_flops(args[query], args[value], products), operators=1)
    if name in _TOKENS_FIRST:
        query, value, products = _TOKENS_FIRST[name]
        q, v = args[query].transpose(1, 2), args[value].transpose(1, 2)
        return Work(attention_flops=_attention_flops(q, v, products), operators=1)
    if name in _VARLEN:
        query, value, sequences, products = _VARLEN[name]
        flops = _varlen_flops(args[query], args[value], args[sequences], products)
        return Work(attention_flops=flops, operators=1)
    match name.removeprefix("fsdp_advisor::"):
        case "attention_kernel":
            return Work(attention_flops=args[2] * 2 * args[0].numel() * args[1], operators=1)
        case "linear_attention_kernel":
            return Work(attention_flops=args[1], traffic_bytes=_n_bytes(args[0]))
        case "fused_kernel":
            return Work(matmul_flops=sum(args[2:]), traffic_bytes=_n_bytes(args[0]) + _n_bytes(args[1]), operators=1)
        case "mxfp8_rows":
            return Work(traffic_bytes=_n_bytes(args), operators=1)
        case "loss_product":
            logits = args[0].shape[0] * args[1].shape[0]
            return Work(matmul_flops=2 * logits * args[0].shape[1], traffic_bytes=logits * args[2], operators=1)
        case "aten::_grouped_mm":
            rows, inner = args[0].shape[-2:]
            return Work(matmul_flops=2 * rows * inner * args[1].shape[-1], operators=1)
        case "allocation" | "aten::empty_strided":  # the latter allocates in Inductor's code
            return NONE
        case _:
            return None


def _n_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def rows_and_columns(func: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """(rows, columns) of a sum over the first dimensions of a tensor whose last dimension is contiguous; None for other
    operators.
    """
    if func is not torch.ops.aten.sum.dim_IntList or not args[1]:
        return None
    tensor, summed = args[0], {dim % args[0].dim() for dim in args[1]}
    if summed != set(range(len(summed))) or tensor.stride(-1) != 1 or not tensor.numel():
        return None
    rows = math.prod(tensor.shape[: len(summed)])
    if rows == tensor.numel():
        return None
    return rows, tensor.numel() // rows
