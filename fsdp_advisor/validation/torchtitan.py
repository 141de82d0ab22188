"""A model prepared by torchtitan's own code, as rank 0 of a fake process group."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation.engines import optimizer_for
from fsdp_advisor.validation.failures import ModeUnavailable

MAX_NORM = 1.0
"""torchtitan's limit of the gradient norm. Source: torchtitan 0.3.0, config/configs.py, TrainingConfig."""


@dataclass
class TorchtitanTrainer:
    """The phases of a step of torchtitan's `Trainer.train_step`."""

    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    keeps_gradients: bool

    def forward(self) -> torch.Tensor:
        return self.source.loss(self.model, self.batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        clip: Any = importlib.import_module("torchtitan.distributed.utils").clip_grad_norm_
        clip(list(self.model.parameters()), MAX_NORM, foreach=True)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)


def torchtitan_trainer(
    source: Source, model: nn.Module, plan: Plan, mesh: DeviceMesh | None, batch: dict[str, torch.Tensor]
) -> TorchtitanTrainer:
    """The model after `apply_fsdp_to_decoder`, and the optimizer."""
    if plan.precision == "fp16-mixed":
        raise ModeUnavailable("torchtitan does not train in fp16", hint="--precision bf16-mixed")
    fsdp: Any = importlib.import_module("torchtitan.distributed.fsdp")
    computes = torch.float32 if plan.precision == "fp32" else torch.bfloat16
    policy = "default" if plan.reshards else "never"
    fsdp.apply_fsdp_to_decoder(
        model, mesh, computes, torch.float32, pp_enabled=False, reshard_after_forward_policy=policy
    )
    return TorchtitanTrainer(source, model, optimizer_for(model, plan), batch, plan.captures_graph)
