"""Layers that a model finds by their position, which changes when other layers are dropped.

Some vision towers list the positions of layers that differ from the others although their modules are equal: Qwen3-VL's DeepStack takes
features after these layers, each with a merger of its own, and the first text layers add one each; in Qwen2.5-VL these layers attend to
the whole image instead of windows. Such layers must not stand for others (`kinds.signature`), and the lists must follow the layers.

Source: transformers 5.23, models/qwen3_vl/modeling_qwen3_vl.py, models/qwen2_5_vl/modeling_qwen2_5_vl.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

DEEPSTACK = "deepstack_visual_indexes"
POSITIONS = (DEEPSTACK, "fullatt_block_indexes", "cross_attention_layers")
"""The attributes that list positions, next to the `nn.ModuleList` of the layers."""


def mark_positions(model: nn.Module) -> None:
    """Give each layer that is found by its position a setting, which makes it a kind of layer of its own."""
    features = 0
    for module in list(model.modules()):
        for name in POSITIONS:
            for number, index in enumerate(getattr(module, name, None) or ()):
                layers = getattr(module, "blocks", None) or getattr(module, "layers", None)
                if isinstance(layers, nn.ModuleList) and index < len(layers):
                    _mark(layers[index], name, number if name == DEEPSTACK else True)
                    features += name == DEEPSTACK
    for module in model.modules():
        if hasattr(module, "_deepstack_process"):
            for number, layer in enumerate(list(module.get_submodule("layers").children())[:features]):
                _mark(layer, DEEPSTACK, number)


def keep_positions(parent: nn.Module, kept: Sequence[int]) -> None:
    """Let `parent` find its layers at their new positions, after all but the layers `kept` were dropped."""
    new = {index: position for position, index in enumerate(kept)}
    for name in POSITIONS:
        if listed := getattr(parent, name, None):
            setattr(parent, name, [new[index] for index in listed if index in new])


def _mark(layer: nn.Module, name: str, value: int) -> None:
    setattr(layer, f"found_by_{name}", value)
