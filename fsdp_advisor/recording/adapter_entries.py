"""Records adapters that train a few entries of a matrix, without computing their positions; says why others cannot be recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

NEEDS_VALUES = ("WAVEFT", "VBLORA")
"""Methods whose forward selects entries by a mask, or reads a weight, so that fake tensors need values."""
NOT_RECORDABLE = {
    "SHIRA": "multiplies by sparse tensors, whose memory fake tensors do not show",
    "FROD": "decomposes the weights to make its matrices, and multiplies by sparse tensors, whose memory fake tensors do not show",
    "CPT": "weighs the loss by the type of each token, which only the data says, and reads values of its own weights in each step",
    "XLORA": "mixes LoRA adapters that were trained before, which it loads from their checkpoints",
    "ADAMSS": "divides decomposed weights into clusters, whose sizes depend on the weights' values",
    "MULTITASK_PROMPT_TUNING": "multiplies its prompts by matrices of the task of each example, and only the data says which task that is",
    "POLY": "selects its matrices by the task of each example, which only the data says",
}
"""Why the layers or the step of a method cannot be recorded. Source: peft 0.21, tuners/{shira,frod}/layer.py, `forward`; frod/model.py,
`_init_frod_projections`; adamss/layer.py, `update_layer`; multitask_prompt_tuning/model.py, `forward`; cpt/model.py, `get_projection`
and `calculate_loss`; xlora/model.py, `XLoraModel.__init__`; poly/router.py, `forward`.
"""
NOT_RECORDABLE_LORA = {
    "arrow_config": "routes each token to LoRA adapters that were trained before, which it loads from their checkpoints",
    "megatron_config": "adapts the layers of megatron.core, and the modules of this model are those of transformers",
    "monteclora_config": "draws its weights in each step from distributions whose parameters it reads on the host",
}
"""Why a LoRA adapter with this key cannot be recorded. Source: peft 0.21, tuners/lora/{arrow,monteclora,tp_layer}.py."""


class _Places:
    """The positions of WaveFT's entries, shape (2, N). PEFT keeps them on the host and copies them to the GPU in each forward."""

    def __init__(self, count: int) -> None:
        self._count = count

    def to(self, _: torch.device) -> torch.Tensor:
        return torch.zeros((2, self._count), dtype=torch.long, device="cpu")


@contextlib.contextmanager
def entries_without_values() -> Iterator[None]:
    """Context in which layers of UniLoRA and WaveFT are built with fixed valid positions, instead of positions that are drawn.

    Source: peft 0.21, tuners/unilora/model.py, `_assign_unilora_indices_and_scales`; tuners/waveft/layer.py, `update_layer`.
    """
    from peft.tuners.unilora.model import UniLoraModel
    from peft.tuners.waveft.layer import WaveFTLayer

    update = WaveFTLayer.update_layer

    def scale(model: Any, adapter: str) -> None:
        for layer in model._iter_unilora_layers():
            sides = (layer.unilora_indices_A, layer.unilora_indices_B)
            layer.update_scaling(adapter, *(torch.empty(side[adapter].shape) for side in sides))

    def place(layer: Any, adapter: str, n_frequency: int, **settings: Any) -> None:
        update(layer, adapter, n_frequency, **settings)
        layer.waveft_indices[adapter] = _Places(n_frequency)

    with (
        mock.patch.object(UniLoraModel, "_assign_unilora_indices_and_scales", scale),
        mock.patch.object(WaveFTLayer, "update_layer", place),
    ):
        yield
