"""The interface of a model that can be recorded: it builds the model, its inputs and its loss, and names the modules that are units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_advisor.job.adaptation import CONFIG_KEY
from fsdp_advisor.model.tape_key import TapeCheckpointing


@dataclass(frozen=True)
class LayerStack:
    """Layers that run one after the other. `path`: the container's name, or the layer's own name for a single layer."""

    path: str
    layers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class RootModules:
    """The modules of a model's root that most models have; None if the model does not have one.

    `embedding` and `head` share a weight if they are tied. `final_norm` is the last norm among the base model's direct children.
    """

    embedding: nn.Module | None = None
    final_norm: nn.Module | None = None
    head: nn.Module | None = None


class Source(Protocol):
    """A model that can be recorded.

    `build`, `keep_layers` and `configure` run outside any fake mode, on modules of the meta device; `batch` and `loss` run under
    the fake mode, on fake tensors; `stacks` and `root_modules` run on both kinds of modules.
    """

    name: str
    task: str
    max_seq_len: int | None
    min_seq_len: int
    """The least number of tokens in a sequence, for example those of its images."""
    needs_values: bool
    """Whether a step depends on the values of small tensors, such as the grids of images."""
    expert_imbalance: float | None
    """The tokens of the busiest expert as a multiple of the mean; None if the step does not depend on the experts that tokens choose."""
    alike_up_to: int | None
    """The number of tokens above which the model runs slightly different code. Recordings use fewer tokens."""
    inventory_dtype: torch.dtype
    """The dtype in which the model is built to list its parameters. A parameter with another dtype then has that dtype at every
    precision.
    """

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The whole model in training mode, on the meta device."""

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        """The units of `module` other than its root, in the order of `module.modules()`."""

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        """Drop all layers except `kept` (by the stack's path) from each stack, in place, so that the model still runs."""

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        """Choose the code path.

        `checkpointing`: the layers that the model recomputes; for `every-N` the model must already be built with N checkpointed.
        `window_filled`: whether sequences fill sliding windows; None: the configuration and the sequence length decide.
        """

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one forward."""

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Inputs and labels, created on the current default device."""

    def root_modules(self, module: nn.Module) -> RootModules:
        """Embedding, final norm and head. The head's outputs are the logits, where the loss chain begins."""

    def is_added(self, parameter: str) -> bool:
        """Whether the parameter of this name was added to the model: an adapter's weight, or a copy that is trained."""

    def config(self) -> dict[str, object]:
        """The values that identify the model, JSON-compatible."""


class WrappedSource:
    """A source that behaves as `base` in everything that a subclass does not override."""

    def __init__(self, base: Source) -> None:
        self._base = base
        self.name = base.name
        self.task = base.task
        self.max_seq_len = base.max_seq_len
        self.min_seq_len = base.min_seq_len
        self.needs_values = base.needs_values
        self.expert_imbalance = base.expert_imbalance
        self.alike_up_to = base.alike_up_to
        self.inventory_dtype = base.inventory_dtype

    def build(self, dtype: torch.dtype) -> nn.Module:
        return self._base.build(dtype)

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        return self._base.stacks(module)

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        self._base.keep_layers(module, kept)

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        self._base.configure(module, attention=attention, checkpointing=checkpointing, window_filled=window_filled)

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._base.loss(module, batch)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        return self._base.batch(micro_batch_size, seq_len)

    def root_modules(self, module: nn.Module) -> RootModules:
        return self._base.root_modules(module)

    def is_added(self, parameter: str) -> bool:
        return self._base.is_added(parameter)

    def config(self) -> dict[str, object]:
        return self._base.config()


def is_of_torchtitan(source: Source) -> bool:
    """Whether the model is of a class of torchtitan."""
    adaptation: Any = source.config().get(CONFIG_KEY, {})
    return bool(adaptation.get("own_model"))
