"""Random weights for real runs, made on their device: whole, unit by unit, or shard by shard. Tied weights stay tied."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fsdp_advisor.recording.storages import local_tensor

STANDARD_DEVIATION = 0.02


class Materialiser:
    """Replaces meta tensors by real ones on `device`. A tied parameter is made once.

    It keeps only weak references to the parameters it has made, so that a unit's whole weights are freed once the engine has
    sharded them.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def model(self, model: nn.Module) -> None:
        """Make all parameters and buffers of a model."""
        kept = []  # strong references until the end; else a tied weight could be freed between its two modules
        for module in model.modules():
            self.module(module)
            kept.append(list(module._parameters.values()))

    def module(self, module: nn.Module) -> None:
        """Make the module's own parameters and buffers, not those of its children."""
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
            self._made[id(meta)] = (meta, weakref.ref(made))  # holding `meta` keeps its id from being reused
        return made


def materialise_shards(model: nn.Module, device: str, *, offloaded: bool = False) -> None:
    """Make the local shards of a model that FSDP2 has sharded on the meta device. `offloaded`: on the host, except buffers.

    `to_empty` unties weights, so the first parameter, which FSDP2 holds, is put back in all modules that share it.
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
    """Replace the meta tensors that are plain attributes of a module."""
    values: dict[str, Any] = vars(module)
    for name, value in list(values.items()):
        if isinstance(value, torch.Tensor) and value.is_meta:
            setattr(module, name, torch.zeros(value.shape, dtype=value.dtype, device=device))
