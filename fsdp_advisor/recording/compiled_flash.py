"""FlashAttention-2 within compiled code: transformers' own code calls it, over operators that stand for those of flash-attn.

torch.compile does not look into these operators: it decides what is kept for backward, allocates the gradients and passes them to the
operator of backward, which fills them. Where transformers' code reads a value, such as whether the only row of a batch is packed, it
breaks the graph, in a recording as in training.

Source: flash-attn 2.8.3, flash_attn/flash_attn_interface.py; transformers 5.23, modeling_flash_attention_utils.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward

from fsdp_advisor.recording.fake_operators import fake_operator
from fsdp_advisor.recording.flash import VarlenAttention, flash, flash_forward, varlen

COMPILED = "recorded_compiled_attention"
"""The name of transformers' flash attention over these operators."""
_GRADIENTS = ("dq", "dk", "dv")


@fake_operator("compiled_flash_backward", mutates=_GRADIENTS)
def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of q, k and v."""


@fake_operator("compiled_flash_varlen_backward", mutates=_GRADIENTS)
def _varlen_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sequences: int, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of q, k and v of sequences in one row."""


class _Attention(torch.autograd.Function):
    """flash-attn's function. It allocates the gradients and lets the operator fill them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _backward(grads[0], q, k, v, out, lse, *gradients)
        return gradients


class _VarlenAttention(VarlenAttention):
    """The same for sequences in one row, with the forward of the uncompiled function."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, _ = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _varlen_backward(grads[0], q, k, v, out, lse, ctx.sequences, *gradients)
        return (*gradients, None, None)


def _flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """flash-attn's function of this name, also where a layer runs without compiled code."""
    if not torch.compiler.is_compiling():
        return flash(q, k, v)
    out: torch.Tensor = _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


def _flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> torch.Tensor:
    sequences = cu_seqlens_q.numel() - 1
    if not torch.compiler.is_compiling():
        return varlen(q, k, v, cu_seqlens_q, sequences)
    out: torch.Tensor = _VarlenAttention.apply(q, k, v, cu_seqlens_q, sequences)  # type: ignore[no-untyped-call]  # torch's
    return out


def _no_arguments(**_: Any) -> dict[str, Any]:
    """None of the arguments that transformers chooses, such as the scale: no tensor depends on them."""
    return {}


@contextlib.contextmanager
def flash_attention_in_graphs() -> Iterator[None]:
    """Context in which transformers' flash attention runs over these operators, and the rows of batches are not packed."""
    functions: dict[str, Any] = {
        "_loaded_implementation": COMPILED, "_flash_fn": _flash_attn_func, "_flash_varlen_fn": _flash_attn_varlen_func,
        "_process_flash_kwargs_fn": _no_arguments, "_process_with_kvcache_kwargs_fn": _no_arguments,
    }  # fmt: skip
    with (
        mock.patch.multiple(modeling_flash_attention_utils, **functions),
        mock.patch.object(FakeTensor, "__bool__", _is_true),
    ):
        yield


_read = FakeTensor.__bool__


def _is_true(tensor: FakeTensor) -> bool:
    """The value of a tensor; if it is unknown, because compiled code computes it, False: the row is not packed."""
    try:
        return bool(_read(tensor))
    except DataDependentOutputException:
        return False


AttentionInterface.register(COMPILED, flash_attention_forward)


def _mask(attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    """None, as transformers' `flash_attention_mask` returns for a mask without padding. It reads the mask, which breaks the graph."""
    if attention_mask is not None:
        attention_mask.all()
        torch._dynamo.graph_break()


AttentionMaskInterface.register(COMPILED, _mask)
