"""The load-balancing loss of a model's routers, which TRL's trainers add to the loss of models with experts.

After the model's own loss, each layer's router logits become a term. The recorded layers stand for more real ones, so each term is a
segment of its layer. A term keeps two storages: its gradient until the layer's backward, and the other bytes of the probabilities until the
loss's backward. Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`, and `aux_loss_enabled` of the trainers; transformers 5.23,
models/mixtral/modeling_mixtral.py, `load_balancing_loss_func`, and utils/output_capturing.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import _active_collector

from fsdp_advisor.model.tape import ROOT, TapePhase
from fsdp_advisor.recording.scoring import scoring_phase
from fsdp_advisor.recording.source import LayerStack

Begin = Callable[[TapePhase, int, int], None]
"""Begins a segment of the recorded step: its phase, stack and layer."""


class _Recorded:
    begin: Begin | None = None


@contextlib.contextmanager
def terms_recorded(begin: Begin) -> Iterator[None]:
    """Context of a recorded step, in which the terms of the loss begin segments with `begin`."""
    _Recorded.begin = begin
    try:
        yield
    finally:
        _Recorded.begin = None


class RouterLoss:
    """Computes the load-balancing loss of a model's forwards: `outputs`, and after the model's own loss `loss`."""

    def __init__(self, model: PreTrainedModel, stacks: Sequence[LayerStack]) -> None:
        """`stacks`: the layers that the tape divides into segments; none if the whole model is compiled."""
        config = model.config.get_text_config()
        self._experts, self._chosen = config.num_experts, config.num_experts_per_tok
        self._weight = config.router_aux_loss_coef
        self._has_layers = bool(stacks)
        for s, stack in enumerate(stacks):
            for i, layer in enumerate(stack.layers):
                layer.register_forward_hook(partial(self._after_layer, s, i))
        self._mask: torch.Tensor | None = None
        self._places: list[tuple[int, int]] = []
        self._freed_by_loss: list[torch.Tensor] = []

    def outputs(self, base_model: Callable[..., Any], *, input_ids: torch.Tensor, **inputs: Any) -> Any:
        """The outputs of a forward of the base model. A batch in one row has no mask."""
        self._mask = None if "position_ids" in inputs else torch.ones_like(input_ids)
        self._places = []
        return base_model(input_ids=input_ids, output_router_logits=True, **inputs)

    def loss(self, outputs: Any) -> torch.Tensor:
        """The weighted loss of the routers in the forward with these outputs."""
        mask, self._mask = self._mask, None
        if _Recorded.begin is None or not (self._has_layers and torch.is_grad_enabled()):
            loss = load_balancing_loss_func(outputs.router_logits, self._experts, self._chosen, mask)
        else:
            loss = self._sum_of_terms(outputs.router_logits, mask)
        weighted: torch.Tensor = self._weight * loss
        return weighted

    def _after_layer(self, stack: int, layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured = (_active_collector.get() or {}).get("router_logits", [])
        self._places += [(stack, layer)] * (len(captured) - len(self._places))

    def _sum_of_terms(self, router_logits: Sequence[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        assert _Recorded.begin is not None
        flat = None if mask is None else mask.reshape(-1).to(torch.float32)
        terms = []
        for place, logits in zip(self._places, router_logits, strict=True):
            _Recorded.begin("routers", *place)
            terms.append(_Term.apply(logits, flat, self._chosen, self._freed_by_loss))  # type: ignore[no-untyped-call]  # torch's
        _Recorded.begin("forward", ROOT, 0)
        loss = torch.stack(terms).sum()
        loss.register_hook(lambda _: self._freed_by_loss.clear())
        return loss


class _Term(torch.autograd.Function):
    """The term of one layer. logits (tokens, experts) -> scalar.

    It keeps the gradient of the logits, which the loss's backward allocates for all layers at once. Until then the other bytes of the
    probabilities are in `freed_by_loss`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, mask: torch.Tensor | None, chosen: int, freed_by_loss: list[torch.Tensor]
    ) -> torch.Tensor:
        dtype = torch.float32 if torch.is_autocast_enabled("cpu") else logits.dtype
        previous = _topk_result(
            logits, chosen, dtype
        )  # of the layer before, in variables that this layer's result replaces
        probabilities = F.softmax(logits.to(dtype), dim=-1)
        found = torch.topk(probabilities, chosen, dim=-1)
        del previous
        summed = probabilities.float()
        term = (summed if mask is None else summed * mask.unsqueeze(-1)).sum()
        more = probabilities.nbytes - logits.nbytes
        del found, summed, probabilities
        ctx.gradient = torch.empty_like(logits)
        freed_by_loss.append(torch.empty(more, dtype=torch.uint8))
        return term

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None, None, None


def _topk_result(logits: torch.Tensor, chosen: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the values and indices that `torch.topk` returns for these logits."""
    shape = *logits.shape[:-1], chosen
    return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.long)


def router_loss(model: PreTrainedModel, stacks: Sequence[LayerStack]) -> RouterLoss | None:
    """The loss of the model's routers if TRL adds one: its configuration knows router logits, and their loss has a weight.

    TRL fails to compute it if the configuration calls the number of experts by another name, so such a model is trained without it.
    """
    config = model.config.get_text_config()
    adds = all(hasattr(config, name) for name in ("output_router_logits", "router_aux_loss_coef", "num_experts"))
    return RouterLoss(model, stacks) if adds and config.router_aux_loss_coef else None


def is_trained_forward() -> bool:
    """Whether the forward that runs now has the routers' loss. Forwards that only score completions have none."""
    return scoring_phase() in (None, "evaluate")
