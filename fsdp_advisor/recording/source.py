"""What the recorder needs to know of a model: how to build it, what to feed it, and which modules are units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class LayerStack:
    """Layers that run one after the other. `path` is the container's name, or the layer's own for a layer that stands alone."""

    path: str
    layers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class RootModules:
    """The modules of a model's root that have a name in every model; None where it has none such.

    `embedding` and `head` share a weight where they are tied. `final_norm` is the last norm among the base model's own children.
    """

    embedding: nn.Module | None = None
    final_norm: nn.Module | None = None
    head: nn.Module | None = None


class Source(Protocol):
    """A model that can be recorded. Everything is called outside any fake mode; modules are on the meta device."""

    name: str
    task: str
    max_seq_len: int | None
    alike_up_to: int | None
    """Tokens beyond which the model runs other code, a little; recordings are made below."""

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The whole model in training mode, on the meta device."""

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        """The units of `module` other than its root, in the order of `module.modules()`."""

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        """Drop from each stack (by path) all layers but `kept`, in place, such that the model still runs."""

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: bool, window_filled: bool | None = None
    ) -> None:
        """Choose the code path.

        `checkpointing`: the model checkpoints its layers itself. `window_filled`: whether sequences fill sliding windows; None: as
        the configuration and the length have it.
        """

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One forward to the loss."""

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Inputs and labels, created on the current default device."""

    def root_modules(self, module: nn.Module) -> RootModules:
        """Embedding, final norm and head. The head's outputs are the logits, where the loss chain begins."""

    def config(self) -> dict[str, object]:
        """What identifies the model, JSON-compatible."""
