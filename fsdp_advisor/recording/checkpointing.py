"""Activation checkpointing of a transformers model: the arguments with which its own code checkpoints layers.

`selective` keeps the outputs of some operators through `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_advisor.errors import assert_never
from fsdp_advisor.model.tape_key import TapeCheckpointing

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
"""The fused kernels of sdpa on a GPU."""
_RECORDED_ATTENTION = (
    "fsdp_advisor::flash_attention",
    "fsdp_advisor::efficient_attention",
    "fsdp_advisor::flash_varlen",
)
"""The operators that stand for these kernels in a recording."""
_MORE_OF_TORCHTITAN = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::max",
    "aten::linear",
    "aten::topk",
)
"""Operators that torchtitan adds to those that PyTorch's partitioner considers compute-intensive, except collectives and kernels of
packages that no transformers model uses.
"""
_IN_TURNS = ("aten::mm", "aten::linear")
"""Operators of which torchtitan keeps every other output."""


def arguments(checkpointing: TapeCheckpointing, attention: str) -> dict[str, Any]:
    """The `activation_checkpointing_kwargs` of transformers. `attention`: the implementation with which the model runs."""
    match checkpointing:
        case "selective":
            context = functools.partial(_contexts, functools.partial(_torchtitan_policy, attention))
            return {"use_reentrant": False, "early_stop": False, "context_fn": context}
        case "selective-trl":
            return {"use_reentrant": False, "context_fn": functools.partial(_contexts, _trl_policy)}
        case "reentrant":
            return {"use_reentrant": True}
        case "every":
            return {"use_reentrant": False, "context_fn": _plain_contexts}
        case "none" | "full" | "full-accelerate":
            return {"use_reentrant": False}
        case _:
            assert_never(checkpointing)


# Policies

_Policy = Callable[..., CheckpointPolicy]


@functools.lru_cache(maxsize=2)
def _torchtitan_operators(attention: str) -> frozenset[str]:
    """The operators whose outputs torchtitan keeps. The flash_attn package is not among them, but sdpa's kernels are.

    Source: torchtitan 0.3.0, distributed/activation_checkpoint.py, _get_default_save_ops.
    """
    from torch._functorch.partitioners import get_default_op_list  # takes a second: imports PyTorch's compiler

    operators: Any = get_default_op_list().compute_intensive_ops
    intensive = {str(operator.default._schema.name) for operator in operators}
    recorded = _RECORDED_ATTENTION if attention == "sdpa" else ()
    return frozenset({*intensive, *_MORE_OF_TORCHTITAN, *recorded})


def _torchtitan_policy(attention: str) -> _Policy:
    """torchtitan's policy for one layer and step, which recomputes every second matrix product. Source: torchtitan 0.3.0,
    distributed/activation_checkpoint.py, SelectiveAC.

    PyTorch 2.13 calls it in forward only, older versions also in the recomputation.
    """
    kept = _torchtitan_operators(attention)
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name
        if name in _IN_TURNS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        is_kept = name in kept and operator._overloadname == "default"
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _trl_policy() -> _Policy:
    """TRL's policy: it keeps the outputs of attention. Source: trl 1.16, models/selective_activation_checkpointing.py."""
    kept = {*_ATTENTION, *_RECORDED_ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu"}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name
        is_kept = name in kept or "flash_attn" in name
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# Recomputation


class _Recomputation:
    """Context of a recomputation, within the context of a policy if there is one."""

    depth = 0

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        _Recomputation.depth += 1
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _Recomputation.depth -= 1
        if self._inner is not None:
            self._inner.__exit__(kind, error, trace)


def is_recomputing() -> bool:
    """Whether a checkpointed layer is being recomputed. Unknown, so False, for layers that are checkpointed `full`y."""
    return _Recomputation.depth > 0


def _plain_contexts() -> tuple[Any, Any]:
    return nullcontext(), _Recomputation()


def _contexts(make_policy: Callable[[], _Policy]) -> tuple[Any, Any]:
    """The contexts of forward and recomputation in which the policy decides."""
    forward, again = create_selective_checkpoint_contexts(make_policy())
    return forward, _Recomputation(again)
