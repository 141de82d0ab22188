"""Buffers that a model's own code replaces when it runs, such as a table of positions that it casts to the dtype of activations."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable

import torch
from torch import nn


def replaced_buffers(model: nn.Module, layers: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """By name, the buffers outside `layers` that their module's forward replaces.

    From the first step on their dtype differs from the built model's, and depends on the precision. CTRL and
    Wav2Vec2-Conformer have such tables. They are part of the tape, not of the inventory.
    """
    within = {module for layer in layers for module in layer.modules()}
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if module not in within and module._buffers
        for name in _assigned(module) & module._buffers.keys()
        if (buffer := module._buffers[name]) is not None
    }


def _assigned(module: nn.Module) -> set[str]:
    """The attributes to which a module's forward assigns."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"} if code is not None else set()
