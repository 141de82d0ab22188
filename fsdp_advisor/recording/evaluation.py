"""A model's forward in the Trainer's evaluation: in evaluation mode, without gradients; the model's outputs stay until it ends.

Source: transformers 5.23, trainer.py, `prediction_step`; trl 1.16, trainer/sft_trainer.py, `prediction_step`.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from fsdp_advisor.recording.losses.fused import causal_model
from fsdp_advisor.recording.scoring import scoring
from fsdp_advisor.recording.source import Source, WrappedSource


class EvaluationSource(WrappedSource):
    """A model whose step is an evaluation's forward. The loss that it returns is a constant, so backward does nothing in the model."""

    def configure(self, module: nn.Module, **code_path: Any) -> None:
        self._base.configure(module, **code_path)
        module.eval()

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with scoring("evaluate"):
            loss = self._base.loss(module, batch)
            torch.clear_autocast_cache()
            del loss
        return torch.zeros((), requires_grad=True)


class WithLogits(WrappedSource):
    """A model with a fused loss whose own forward, which computes logits, follows the one that computes the loss.

    `converts`: whether accelerate converts the logits to fp32. Source: accelerate 1.15, accelerator.py, `prepare_model`.
    """

    def __init__(self, base: Source, *, converts: bool) -> None:
        super().__init__(base)
        self._converts = converts

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._base.loss(module, batch)
        torch.clear_autocast_cache()  # accelerate's autocast ends with each forward
        model = causal_model(module, self.name)
        fused, model.forward = model.forward, MethodType(self._logits, model)
        try:
            with scoring("logits"):
                self._base.loss(module, batch)
        finally:
            model.forward = fused
        return loss

    def _logits(self, model: PreTrainedModel, labels: torch.Tensor, **inputs: Any) -> CausalLMOutput:
        """The logits, as the loss: nothing is computed from them."""
        outputs = type(model).forward(model, **inputs, use_cache=False)
        return CausalLMOutput(loss=outputs.logits.float() if self._converts else outputs.logits)
