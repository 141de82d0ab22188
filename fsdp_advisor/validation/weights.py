"""Random weights for real runs, made where they are to live: shard by shard, unit by unit, or whole. Ties are kept."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fsdp_advisor.recording.storages import local_tensor

STANDARD_DEVIATION = 0.02


class Materialiser:
    """Makes meta tensors real on `device`, one module at a time; a parameter met before is met again.

    What it has made is remembered weakly, so that a unit's whole weights go when the engine has sharded them.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def whole(self, model: nn.Module) -> None:
        kept = []  # until the end, for weak references alone would let a tied weight go between its two places
        for module in model.modules():
            self.module(module)
            kept.append(list(module._parameters.values()))

    def module(self, module: nn.Module) -> None:
        """The module's own parameters and buffers, not those of its children."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = self._parameter(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=self._device)
        _plain_attributes(module, self._device)

    def _parameter(self, meta: nn.Parameter) -> nn.Parameter:
        known = self._made.get(id(meta))
        made = known[1]() if known else None
        if made is None:
            data = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
            made = nn.Parameter(_random(data), requires_grad=meta.requires_grad)
            self._made[id(meta)] = (meta, weakref.ref(made))  # the meta parameter keeps its id from being used again
        return made


def shards(model: nn.Module, device: str, *, offloaded: bool = False) -> None:
    """The local shards of a model that FSDP2 has sharded on the meta device; on the host if `offloaded`, buffers never.

    `to_empty` gives every place of a tied weight a tensor of its own; the first, which FSDP2 holds, is put back everywhere.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=torch.device("cpu" if offloaded else device))
    for (owner, name), *others in places.values():
        for other, alias in others:
            other._parameters[alias] = owner._parameters[name]
    for parameter in model.parameters():
        _random(local_tensor(parameter.detach()))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
        _plain_attributes(module, device)


def _random(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.normal_(0, STANDARD_DEVIATION) if tensor.is_floating_point() else tensor.zero_()


def _plain_attributes(module: nn.Module, device: str) -> None:
    """Tensors that a module keeps as plain attributes."""
    values: dict[str, Any] = vars(module)
    for name, value in list(values.items()):
        if isinstance(value, torch.Tensor) and value.is_meta:
            setattr(module, name, torch.zeros(value.shape, dtype=value.dtype, device=device))
