"""Put a model on fake tensors: nothing is computed and no memory is used."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor.recording.ctc_loss import ctc_loss
from fsdp_advisor.recording.quantized import is_packed, materialise_states, readable_weights
from fsdp_advisor.recording.remembered import Operators
from fsdp_advisor.recording.sorted_sets import sorted_sets
from fsdp_advisor.recording.values import KnownValues


@cache
def _froze_earlier(_pid: int) -> bool:
    """Whether this process froze objects before its first recording. Counting them takes as long as a short recording."""
    return gc.get_freeze_count() > 0


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Context without cyclic garbage collection, which would free storages at arbitrary moments of a step.

    Collections between steps skip the objects that exist now, or those that the process froze earlier (`gc.freeze`).
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # errors are also raised
    freezes = not _froze_earlier(os.getpid())
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes:
            gc.unfreeze()


@contextlib.contextmanager
def fake_tensors(
    *, values: bool = False, expert_imbalance: float | None = None, operators: Operators | None = None
) -> Iterator[None]:
    """Context of fake tensors: nothing is computed and no memory is used.

    LayerDrop drops no layer, because it decides by a random number and a fake tensor has no value. Grouped products of experts accept
    every dtype, as on a GPU. DoRA can read packed weights. `values`: small tensors have values if these follow from known numbers or, with
    an `expert_imbalance`, from the choices of a router (`experts.chosen_experts`). `operators` caches the results of operators on these.
    """
    rand = torch.rand
    grouped_product = torch._meta_registrations._meta_grouped_mm_common

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return 1.0 if args == ([],) and not kwargs else rand(*args, **kwargs)

    def multiplied(a: torch.Tensor, b: torch.Tensor, **settings: Any) -> Any:
        """The grouped product for dtypes that PyTorch's fake tensors refuse. Source: ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: it
        multiplies one group after the other into the output.
        """
        if a.dtype in (torch.float32, torch.float16):
            return torch._meta_registrations._create_grouped_mm_output_tensor(a, b, settings["offs"], a.dtype)
        return grouped_product(a, b, **settings)

    with (
        mock.patch.object(torch, "rand", drawn),
        mock.patch.object(torch._meta_registrations, "_meta_grouped_mm_common", multiplied),
        mock.patch.object(torch.nn.functional, "ctc_loss", ctc_loss),
        readable_weights(),
        sorted_sets(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _known_values(expert_imbalance, operators) if values else contextlib.nullcontext(),
    ):
        yield


def _known_values(expert_imbalance: float | None, operators: Operators | None) -> KnownValues:
    """The values of small tensors, with the results of earlier steps that `operators` has."""
    if operators is None:
        return KnownValues(expert_imbalance)
    return KnownValues(expert_imbalance, operators.result, operators.contents)


def materialise(model: nn.Module, parameter_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None = None) -> None:
    """Replace meta tensors by fake CPU tensors, keeping ties. Floating-point parameters and buffers get the given dtypes.

    Packed weights of quantized layers keep their dtype.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                casts = parameter_dtype and parameter.is_floating_point() and not is_packed(parameter)
                dtype = parameter_dtype if casts else parameter.dtype
                data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = buffer_dtype if buffer_dtype and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = torch.empty(buffer.shape, dtype=dtype, device="cpu")
    materialise_attributes(model)
    materialise_states(model)


def materialise_attributes(model: nn.Module) -> None:
    """Replace the meta tensors that modules have as plain attributes, neither parameters nor buffers, by fake CPU tensors."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device="cpu"))
