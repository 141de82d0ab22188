"""Linear layers that multiply in fp8, by torchao's own conversion (`torchao.float8`, 0.18), or in MXFP8 (`mxfp8`).

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
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.errors import MissingExtra
from fsdp_advisor.job.choices import Fp8
from fsdp_advisor.job.fp8 import converts_head, suits_fp8
from fsdp_advisor.recording.mxfp8 import kernels_on_fake_tensors, linear_in_mxfp8
from fsdp_advisor.recording.source import Source, is_of_torchtitan


def convert_linears(model: nn.Module, source: Source, recipe: Fp8) -> None:
    """Convert the linear layers of a source's model whose dimensions suit the recipe in place. The head is converted if `converts_head`.

    Raises MissingExtra without torchao.
    """
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("fp8 needs torchao, which is not installed", extra="torch,fp8")
    with _no_kernels():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    head = None if converts_head(recipe, own_models=is_of_torchtitan(source)) else source.root_modules(model).head

    def takes(module: nn.Linear, name: str) -> bool:
        return module is not head and suits_fp8(module.out_features, module.in_features, recipe)

    if recipe != "mxfp8":
        convert_to_float8_training(model, module_filter_fn=takes, config=Float8LinearConfig.from_recipe_name(recipe))
        return
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, nn.Linear) and takes(module, name):
                setattr(parent, name, linear_in_mxfp8(module, MXFP8Linear))


def on_fake_tensors(recipe: Fp8) -> AbstractContextManager[None]:
    """Context in which converted layers run on fake tensors of a CPU."""
    if recipe == "none":
        return contextlib.nullcontext()
    return kernels_on_fake_tensors() if recipe == "mxfp8" else _autocast_of_cpu()


@contextlib.contextmanager
def _autocast_of_cpu() -> Iterator[None]:
    """Context in which the question whether CUDA's autocast is on, which converted layers ask, is answered by the CPU's. Source: torchao
    0.18, float8/float8_linear.py, `Float8Linear.forward`.
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
    """Context in which torchao's import does not warn that its compiled kernels are missing. A recording does not run
    them.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
