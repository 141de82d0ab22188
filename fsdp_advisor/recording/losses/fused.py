"""Head and loss in one module. Training libraries compute a loss in this way without the whole logits.

A library's module makes the same allocations as the library's own code. Its kernels and matrix products write to existing storages, so
only their work is counted. A loss that runs in tiles of tokens is recorded with one tile, because the next ones use the same storages
again. Labels are shifted by one token, as causal models do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.fake_operators import fake_operator
from fsdp_advisor.recording.router_loss import RouterLoss, is_trained_forward, router_loss
from fsdp_advisor.recording.source import RootModules, Source, WrappedSource


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss: hidden states (B, T, H), the head's weight (V, H) and bias (V), and labels (B, T)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    scored: int
    """The number of tokens with a label. It is given because fake labels have no values."""
    ignored: float
    """The fraction of the labels that are ignored."""
    examples: tuple[int, int]
    """(number of sequences, tokens per sequence) of the labels, even if all sequences are in one row."""


class FusedLoss(nn.Module):
    """A module that replaces the head and also computes the loss. It is called with hidden states and labels; its call begins the loss."""

    def __init__(
        self,
        head: nn.Module,
        compute: Callable[[LossInputs], Any],
        ignored_labels: float,
        gathered_head: str = "",
        completion_length: int = 0,
    ) -> None:
        """`gathered_head`: the dtype in which the loss gathers the weight; empty if FSDP does. `completion_length`: the number of
        tokens of each sequence that have labels; 0: all but the ignored ones.
        """
        super().__init__()
        self.__dict__["head"] = head  # not a submodule: the head belongs to the model
        self._compute = compute
        self._ignored_labels = ignored_labels
        self.gathered_head = gathered_head
        self._completion_length = completion_length
        self.examples: tuple[int, int] | None = None
        """`LossInputs.examples`; None if it equals the shape of the labels."""

    @property
    def weight(self) -> nn.Parameter:
        """The head's weight, by which tied embeddings are recognized."""
        weight: nn.Parameter = self.__dict__["head"].weight
        return weight

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        """The result of `compute`: the loss, or a dictionary with log-probabilities and other outputs."""
        head = self.__dict__["head"]
        sequences, length = self.examples or tuple(labels.shape)
        tokens = sequences * (length - 1)
        scored = self._completion_length * sequences or max(1, tokens - int(tokens * self._ignored_labels))
        weight, bias = head.weight, head.bias
        if self.gathered_head:  # `DTensor.full_tensor`
            weight = weight.to(getattr(torch, self.gathered_head), copy=True)
        elif isinstance(weight, DTensor):  # a simulated step of a head that no unit gathers; the same source
            weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
        ignored = self._ignored_labels
        return self._compute(LossInputs(hidden, weight, bias, labels, scored, ignored, (sequences, length)))


class FusedLossSource(WrappedSource):
    """A language model whose forward ends with a `FusedLoss` in place of its head and loss."""

    tasks: tuple[str, ...] = ("causal-lm",)
    """The tasks of the models that the library's loss is made for."""
    not_causal: str
    """The error for a model of another task, `{task}`."""
    instead: str
    """The error's hint: what to use for such a model."""

    def __init__(self, base: Source, *, router_loss: bool = False) -> None:
        super().__init__(base)
        self._router_loss = router_loss

    def configure(self, module: nn.Module, **code_path: Any) -> None:
        super().configure(module, **code_path)
        if self.task not in self.tasks:
            raise NotRecordable(f"{self.name}: {self.not_causal.format(task=self.task)}", hint=self.instead)
        model = causal_model(module, self.name)
        self.fuse(model)
        config = model.config.get_text_config()
        if hasattr(config, "output_router_logits"):  # only `RouterLoss` asks for them, as TRL does
            config.output_router_logits = False
        model.__dict__["router_loss"] = router_loss(model, self.stacks(module)) if self._router_loss else None

    def fuse(self, model: PreTrainedModel) -> None:
        """Install the fused loss in the model with `set_loss`."""
        raise NotImplementedError

    def root_modules(self, module: nn.Module) -> RootModules:
        found = super().root_modules(module)
        fused = causal_model(module, self.name).__dict__.get("fused_loss")
        return found if fused is None else RootModules(found.embedding, found.final_norm, fused)


def set_loss(model: PreTrainedModel, fused: FusedLoss, forward: Callable[..., Any]) -> None:
    """Make the model compute this loss. `forward`: the new forward, a method that calls `fused_loss_of(self)`."""
    model.__dict__["fused_loss"] = fused  # not a submodule: it has no parameters of its own
    model.forward = MethodType(forward, model)


def fused_loss_of(model: PreTrainedModel) -> FusedLoss:
    fused: FusedLoss = model.__dict__["fused_loss"]
    return fused


def base_outputs(model: PreTrainedModel, *, use_cache: bool | None = False, **inputs: Any) -> Any:
    """The outputs of the model below the head. `use_cache`: whether it keeps keys and values; None: as its configuration says."""
    routers = _routers_of(model)
    if routers is None:
        return model.base_model(**inputs, use_cache=use_cache)
    return routers.outputs(model.base_model, **inputs, use_cache=use_cache)


def router_loss_of(model: PreTrainedModel, outputs: Any) -> torch.Tensor | None:
    """The loss of the model's routers, if the forward that had these outputs computes one."""
    routers = _routers_of(model)
    return None if routers is None else routers.loss(outputs)


def _routers_of(model: PreTrainedModel) -> RouterLoss | None:
    routers: RouterLoss | None = model.__dict__["router_loss"]
    return routers if is_trained_forward() else None


def causal_model(module: nn.Module, name: str) -> PreTrainedModel:
    """The transformers model that has the head, which may be inside wrappers of adapters.

    Raises NotRecordable if there is none, and if the head has an adapter: the loss reads the head's weight and does not call the head.
    TRL refuses such an adapter, too (trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`).
    """
    for inner in module.modules():
        head = inner.get_output_embeddings() if isinstance(inner, PreTrainedModel) else None
        if isinstance(getattr(head, "base_layer", None), nn.Linear):
            raise NotRecordable(
                f"{name}: a fused loss reads the head's weight, so an adapter of the head would not be trained",
                hint="leave the head out of the adapter's targets; --lora-modules-to-save trains it in full; or use --loss full",
            )
        if isinstance(
            getattr(head, "original_module", head), nn.Linear
        ):  # in PEFT's wrapper of a module that it trains in full
            assert isinstance(inner, PreTrainedModel)
            return inner
    raise NotRecordable(
        f"{name}: a fused loss needs a linear head over a vocabulary, which the model does not have",
        hint="--loss full works for every model",
    )


# The work of kernels that write to existing storages


@fake_operator("loss_product")
def loss_product(hidden: torch.Tensor, weight: torch.Tensor, bytes_per_logit: int) -> None:
    """Count the work of a matrix product as large as that of hidden states (N, H) and a weight (V, H), and of a kernel over the logits
    (N, V).

    `bytes_per_logit`: the bytes that the product and the kernel together read and write per logit.
    """


def computes_in(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which products with these hidden states are computed: autocast's if it is on."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
