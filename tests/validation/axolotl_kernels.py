"""axolotl's own code for adapters under fake tensors, on a machine without Triton."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

KEYS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def patches() -> Any:
    """axolotl's module monkeypatch/lora_kernels.py, imported without Triton and without the rest of the package, which needs further
    packages.
    """
    spec = importlib.util.find_spec("axolotl")
    assert spec is not None and spec.submodule_search_locations is not None
    callbacks = types.ModuleType("axolotl.utils.callbacks")
    callbacks.__path__ = [str(Path(spec.submodule_search_locations[0], "utils", "callbacks"))]
    sys.modules.setdefault(callbacks.__name__, callbacks)
    with _triton():
        return importlib.import_module("axolotl.monkeypatch.lora_kernels")


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """Context in which Triton can be imported, by a stub if it is not installed. Other code must not find the stub afterwards."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    stubs = {name: types.ModuleType(name) for name in ("triton", "triton.language")}
    for name, stub in stubs.items():
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(stub).update(jit=lambda function: function, constexpr=int)
    vars(stubs["triton"])["language"] = stubs["triton.language"]
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


@contextlib.contextmanager
def axolotls_kernels() -> Iterator[Callable[..., None]]:
    """Context with a function that replaces the code of a PeftModel as axolotl does. Its keywords are the keys of axolotl's file, all on by
    default. axolotl's functions allocate what they do on a GPU, and compute nothing.
    """
    module = patches()
    patched: list[tuple[Any, Any]] = []

    def use(model: nn.Module, **keys: bool) -> None:
        settings = importlib.import_module("axolotl.utils.dict").DictDefault(dict.fromkeys(KEYS, True) | keys)
        replaces = settings.lora_qkv_kernel or settings.lora_o_kernel  # loaders/patch_manager.py
        modules = model.modules() if replaces else ()
        for attention in {type(m) for m in modules if hasattr(m, "q_proj") and hasattr(m, "o_proj")}:
            patched.append((attention, attention.forward))
            with mock.patch.object(module, "get_attention_cls_from_config", lambda _, found=attention: found):
                module.patch_self_attn_lora(settings)
        module.apply_lora_kernel_patches(model, settings)

    lora: Any = importlib.import_module("axolotl.kernels.lora")
    quantize: Any = importlib.import_module("axolotl.kernels.quantize")
    read = lora.get_lora_parameters

    def parameters(projection: Any) -> Any:
        """Give a gathered weight its state of bitsandbytes, as axolotl's changes of FSDP2 do (monkeypatch/fsdp2_qlora.py)."""
        base = getattr(projection, "base_layer", projection)
        if getattr(base, "quant_state", None) is not None:
            base.weight.quant_state = base.quant_state
        return read(projection)

    functions = {
        "get_lora_parameters": parameters,
        "swiglu_forward": _forward, "swiglu_backward": _backward, "geglu_forward": _forward, "geglu_backward": _backward,
    }  # fmt: skip
    try:
        with (
            mock.patch.multiple(lora, **functions),
            mock.patch.object(quantize, "_ctypes_nf4_dequant", _unpack),
        ):
            yield use
    finally:
        for attention, forward in patched:
            attention.forward = forward
            del attention._original_forward


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


def _backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return grad, gate, up


def _unpack(
    weight: torch.Tensor, absmax: torch.Tensor, _code: object, _absmax: object, offset: torch.Tensor, _blocksize: int, _nested: int,
    shape: tuple[int, ...], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty(tuple(shape), dtype=dtype)
    scales = torch.empty(absmax.numel(), dtype=torch.float32)
    scales += offset
    return out.t() if weight.shape[0] == 1 else out
