"""A training step that a meter measures phase by phase. All modes of validation use it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.recording.engines import cast_floating
from fsdp_advisor.recording.source import LayerStack, Source
from fsdp_advisor.validation.engines import half
from fsdp_advisor.validation.meter import Meter, Phase


class Trainer(Protocol):
    """A model in training: the three phases of a step (forward, backward, optimizer), and clearing gradients."""

    def forward(self) -> torch.Tensor: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@dataclass
class TorchTrainer:
    """A model under one of PyTorch's engines."""

    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]

    def forward(self) -> torch.Tensor:
        with self.autocast():
            return self.source.loss(self.model, self.batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def autocast_of(plan: Plan, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of the autocast context for DDP under mixed precision; the context does nothing for other engines."""
    enabled = plan.backend == "ddp" and plan.mixed
    return lambda: torch.autocast(device, half(plan), enabled=enabled)


def batch_of(source: Source, plan: Plan, model: nn.Module, *, real: bool) -> dict[str, torch.Tensor]:
    """Inputs and labels on the current default device.

    `real`: tokens are random. Equal tokens would all go to the same experts of a mixture of experts.
    """
    batch = source.batch(*plan.tape_shape)
    if plan.precision == "bf16":  # training code casts pixels and sound to the model's dtype
        batch = {name: cast_floating(tensor, torch.bfloat16) for name, tensor in batch.items()}
    vocabulary = _vocabulary(model)
    if real and vocabulary and "input_ids" in batch:
        generator = torch.Generator().manual_seed(0)
        for name in ("input_ids", "labels"):
            if name in batch and batch[name].ndim == 2:
                batch[name].copy_(
                    torch.randint(0, vocabulary, tuple(batch[name].shape), generator=generator, device="cpu")
                )
    return batch


def _vocabulary(model: nn.Module) -> int | None:
    getter = getattr(model, "get_input_embeddings", None)
    embedding = None
    if getter is not None:
        with suppress(NotImplementedError):  # a model without embeddings
            embedding = getter()
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def layers_of(stacks: list[LayerStack]) -> list[nn.Module]:
    return [layer for stack in stacks for layer in stack.layers]


def take_step(
    trainer: Trainer, meter: Meter, accumulation: int, after_backward: Callable[[], None] | None = None
) -> dict[str, Phase]:
    """Take one optimizer step of `accumulation` micro-batches. Returns the peak and the duration of each phase."""
    phases: dict[str, Phase] = {}

    def ended(phase: str) -> None:
        found = meter.end()
        phases[phase] = phases[phase] | found if phase in phases else found

    for _ in range(accumulation):
        meter.begin("forward")
        loss = trainer.forward()
        ended("forward")
        meter.begin("backward")
        trainer.backward(loss)
        ended("backward")
    if after_backward is not None:
        after_backward()
    meter.begin("optimizer")
    trainer.step()
    ended("optimizer")
    trainer.zero_grad()
    del loss
    return phases
