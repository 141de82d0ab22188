"""Layers that a model finds by their position, which changes when other layers are dropped.

Some vision towers list the positions of layers that differ from the others although their modules are equal: Qwen3-VL's DeepStack takes
features after these layers, each with a merger of its own, and the first text layers add one each; in Qwen2.5-VL these layers attend to
the whole image instead of windows. LLaVA's models take the features after the layers of `vision_feature_layer`. Such layers must not stand
for others (`kinds.signature`), and the lists must follow the layers.

Source: transformers 5.23, models/qwen3_vl/modeling_qwen3_vl.py, models/qwen2_5_vl/modeling_qwen2_5_vl.py,
models/granite_docling/modeling_granite_docling.py, models/llava/modeling_llava.py, utils/output_capturing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

DEEPSTACK = "deepstack_visual_indexes"
POSITIONS = (DEEPSTACK, "fullatt_block_indexes", "cross_attention_layers")
"""The attributes that list positions, next to the `nn.ModuleList` of the layers."""
SELECTED = "vision_feature_layer"
"""The setting that selects hidden states of a vision tower: 0 is the input of the first layer, -1 the output of the last."""


def mark_positions(model: nn.Module) -> None:
    """Give each layer that is found by its position a setting, which makes it a kind of layer of its own."""
    features = 0
    for module in list(model.modules()):
        for name in POSITIONS:
            for number, index in enumerate(_listed(module, name)):
                layers = _layers(module)
                if layers is not None and index < len(layers):
                    _mark(layers[index], name, number if name == DEEPSTACK else True)
                    features += name == DEEPSTACK
    for module in model.modules():
        if hasattr(module, "_deepstack_process"):
            for number, layer in enumerate(list(module.get_submodule("layers").children())[:features]):
                _mark(layer, DEEPSTACK, number)
    for layers in _towers(model):
        for state in _selected(model, len(layers)):
            if 0 < state < len(layers) - 1:  # the last two layers stand only for themselves
                _mark(layers[state - 1], SELECTED, True)


def keep_positions(model: nn.Module, parent: nn.Module, depth: int, kept: Sequence[int]) -> None:
    """Let `parent`, a module of `model`, find its layers at their new positions: of `depth` layers only `kept` are left."""
    new = {index: position for position, index in enumerate(kept)}
    for name in POSITIONS:
        if listed := _listed(parent, name):
            holder = parent if hasattr(parent, name) else parent.config
            setattr(holder, name, [new[index] for index in listed if index in new])
    if any(_layers(parent) is layers for layers in _towers(model)):
        tower: Any = _configs(model)[0].vision_config
        tower.num_hidden_layers = len(kept)  # transformers counts selected states from its end
        states = [new[state - 1] - len(kept) if state else -1 - len(kept) for state in _selected(model, depth)]
        for config in _configs(model):
            is_list = not isinstance(getattr(config, SELECTED), int)
            setattr(config, SELECTED, states if is_list else states[0])


def _listed(module: nn.Module, name: str) -> Sequence[int]:
    """The positions that a module lists under this name; DeepStack's may be in the configuration of the tower."""
    listed = getattr(module, name, None)
    if listed is None and name == DEEPSTACK and _layers(module) is not None:
        listed = getattr(getattr(module, "config", None), name, None)
    return listed or ()


def _layers(module: nn.Module) -> nn.ModuleList | None:
    layers = getattr(module, "blocks", None) or getattr(module, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a model that selects hidden states of its vision tower; empty for other models."""
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if getattr(c, SELECTED, None) is not None and hasattr(c, "vision_config")]


def _towers(model: nn.Module) -> list[nn.ModuleList]:
    """The layers of the vision tower whose hidden states are selected."""
    tower = _configs(model)[0].vision_config if _configs(model) else None
    parts = [m for m in model.modules() if tower is not None and getattr(m, "config", None) is tower]
    found = {id(layers): layers for part in parts for m in part.modules() if (layers := _layers(m)) is not None}
    return list(found.values())


def _selected(model: nn.Module, depth: int) -> list[int]:
    """The selected hidden states of a tower of `depth` layers, from 0 to `depth`."""
    value = getattr(_configs(model)[0], SELECTED)
    return [state % (depth + 1) for state in ([value] if isinstance(value, int) else value)]


def _mark(layer: nn.Module, name: str, value: int) -> None:
    setattr(layer, f"found_by_{name}", value)
