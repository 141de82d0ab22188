"""The Python code that Inductor generates. It runs on fake tensors, with its allocations, reuses and frees; its kernels only count work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._inductor.graph import GraphLowering

from fsdp_advisor.recording.flash import cudnn_scratch, flash_scratch, scratch, varlen_scratch
from fsdp_advisor.recording.fused_kernels import attention_kernel, kernel
from fsdp_advisor.recording.on_gpu import efficient_scratch

_OF_TRITON = re.compile(
    r"^(?:import triton.*|from (?:triton|torch\._inductor\.runtime\.triton_heuristics) .*)$", re.MULTILINE
)
"""Matches lines that import what only real Triton kernels need."""


def load(_: GraphLowering, code: Any) -> ModuleType:
    """The module of generated code, with kernels that only count their work."""
    module = ModuleType("generated")
    module.__file__ = "generated"
    source = _OF_TRITON.sub("", code.value)
    source = source.replace("torch.ops.aten._scaled_dot_product", "attention_kernels._scaled_dot_product")
    source = source.replace("torch.ops.fsdp_advisor.compiled_flash", "flash_kernels.compiled_flash")
    source = source.replace("extern_kernels._scaled_mm", "scaled_mm")
    source = source.replace("torch.ops.higher_order.graphsafe_run_with_rng_state", "run_with_seed")
    source = source.replace("from torch._inductor.async_compile import AsyncCompile", "")
    module.__dict__.update(
        AsyncCompile=_Kernels, attention_kernels=_AttentionKernels(), flash_kernels=_FlashKernels(),
        run_with_seed=_run_with_seed, scaled_mm=_scaled_mm,
    )  # fmt: skip
    exec(compile(source, "generated", "exec"), module.__dict__)  # runs the code that Inductor generated
    return module


def template(code: str, *_: Any, **__: Any) -> SimpleNamespace:
    """An empty stand-in for the module of a template's kernel, which only autotuning would run."""
    return SimpleNamespace(__file__="generated", key="generated")


class _Kernels:
    """Replaces Inductor's `AsyncCompile`: makes a `_Kernel` from Triton source."""

    def triton(self, name: str, source: str, **_: Any) -> _Kernel:
        found = re.search(rf"def {name}\(([^)]*)\)", source)
        assert found is not None, "Inductor names a kernel's function as the kernel"
        return _Kernel([word.split(":")[0].strip() for word in found[1].split(",")])

    def wait(self, _: Any) -> None:
        """Do nothing: no kernel is compiled."""


class _Kernel:
    """A Triton kernel that only counts its work. `arguments`: the names of its arguments. Those that begin with `in_` are read; those with
    `out_ptr`, and those that begin with `ws_ptr`, are written.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments

    def run(self, *values: Any, **_: Any) -> None:
        tensors = [(name, v) for name, v in zip(self._arguments, values, strict=False) if isinstance(v, torch.Tensor)]
        named = dict(tensors)
        if "arg_Q" in named:  # of FlexAttention. Source: torch 2.13, _inductor/kernel/flex/templates
            attention_kernel(named["arg_Q"], named["arg_LSE"].shape[-1], 5 if "arg_DO" in named else 2)
            return
        reads = [tensor for name, tensor in tensors if name.startswith("in_")]
        writes = [tensor for name, tensor in tensors if "out_ptr" in name or name.startswith("ws_ptr")]
        kernel(reads, writes)


class _AttentionKernels:
    """The operators of sdpa's kernels. Their backward also allocates the kernels' scratch, which the fake operators lack."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.aten, name).default
        if not name.endswith("_backward"):
            return SimpleNamespace(default=operator)

        def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gradients = operator(grad, q, k, *args, **kwargs)
            with scratch():
                if "efficient" in name:
                    taken = efficient_scratch(q, grad.transpose(1, 2), args[2].transpose(1, 2))
                else:
                    needs = cudnn_scratch if "cudnn" in name else flash_scratch
                    taken = needs(q.transpose(1, 2), k.transpose(1, 2))
            del taken
            return gradients

        return SimpleNamespace(default=backward)


class _FlashKernels:
    """The operators of flash-attn's backward, with the kernels' scratch."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.fsdp_advisor, name).default

        def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *args: Any) -> None:
            with scratch():
                taken = varlen_scratch(q, k, args[3]) if "varlen" in name else flash_scratch(q, k)
            operator(grad, q, k, *args)
            del taken

        return SimpleNamespace(default=backward)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> None:
    """Count the work of an fp8 product that writes to `out`. Fake tensors do not support this operator."""
    kernel([], [out], 2 * a.shape[0] * a.shape[1] * b.shape[1])


def _run_with_seed(operator: Callable[..., Any], *args: Any, rng_state: Any, **kwargs: Any) -> Any:
    """Run an operator that recomputation repeats with the random numbers of forward."""
    return operator(*args, **kwargs)


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
