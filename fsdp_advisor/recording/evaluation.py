"""A model's forward in the Trainer's evaluation: in evaluation mode, without gradients; the model's outputs stay until it ends.

Source: transformers 5.23, trainer.py, `prediction_step`; trl 1.16, trainer/sft_trainer.py, `prediction_step`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_advisor.recording.scoring import scoring
from fsdp_advisor.recording.source import WrappedSource


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
