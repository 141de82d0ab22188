"""Linear layers that multiply in fp8, by torchao's own conversion (`torchao.float8`, 0.18).

Each product casts both of its operands to fp8: the absolute maximum of the tensor (`tensorwise`) or of each row (`rowwise`) gives a
scale, and the scaled copy in fp32 becomes one byte per element. Weights, activations and gradients between the layers keep their
dtype. Autograd saves the operands in their own dtype, not the fp8 copies, so backward casts them again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.errors import MissingExtra
from fsdp_advisor.job.choices import Fp8
from fsdp_advisor.job.fp8 import suits_fp8


def convert_linears(model: nn.Module, recipe: Fp8, head: nn.Module | None) -> None:
    """Convert linear layers of a model in place, as torchtitan does: those whose dimensions are multiples of 16, except the head.

    Source of the exception: torchtitan 0.3, models/llama3/config_registry.py, filter_fqns of Float8LinearConverter.
    Raises MissingExtra without torchao.
    """
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("fp8 needs torchao, which is not installed", extra="torch,fp8")
    with _no_kernels():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def takes(module: nn.Linear, name: str) -> bool:
        return module is not head and suits_fp8(module.out_features, module.in_features)

    convert_to_float8_training(model, module_filter_fn=takes, config=Float8LinearConfig.from_recipe_name(recipe))


@contextlib.contextmanager
def autocast_of_cpu() -> Iterator[None]:
    """Context in which converted layers, which ask whether CUDA's autocast is on, get the state of the CPU's. Source: torchao 0.18,
    float8/float8_linear.py, `Float8Linear.forward`.
    """
    enabled = torch.is_autocast_enabled

    def is_enabled(device: str = "cpu") -> bool:
        return enabled(device)

    with (
        mock.patch.object(torch, "is_autocast_enabled", is_enabled),
        mock.patch.object(torch, "get_autocast_gpu_dtype", functools.partial(torch.get_autocast_dtype, "cpu")),
    ):
        yield


@contextlib.contextmanager
def _no_kernels() -> Iterator[None]:
    """Context in which torchao's import is silent about its compiled kernels, which a recording does not run."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
