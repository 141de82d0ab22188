"""Training code as published runs had it, where it allocates other tensors than the installed versions.

A `Variant` changes what happens between a model's hidden states and its loss; the layers are those of the installed versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from published_jobs import INSTALLED, Variant
from torch import nn
from torch.nn import functional as F
from transformers.loss import loss_utils

from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.recording import Recorder, adapted
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.recording.source import LayerStack, RootModules, Source


class VariantSource:
    """A source with the loss of a variant."""

    def __init__(self, base: Source, variant: Variant) -> None:
        self._base, self._variant = base, variant
        self.name, self.task, self.max_seq_len = base.name, base.task, base.max_seq_len
        self.alike_up_to, self.inventory_dtype = base.alike_up_to, base.inventory_dtype
        self.drops_out = getattr(base, "drops_out", False)

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        older = partial(shifted_loss, upcasts=not self._variant.logits_stay_half)
        functions = {"ForCausalLM": older} if self._variant.shifts_logits else {}
        with mock.patch.dict(loss_utils.LOSS_MAPPING, functions):
            outputs = module(**batch)
        loss: torch.Tensor = outputs.loss
        if self._variant.keeps_outputs:
            loss.outputs = outputs.logits  # type: ignore[attr-defined]  # they live as long as the loss
        return loss

    def build(self, dtype: torch.dtype) -> nn.Module:
        if not self._variant.keeps_dtypes:
            return self._base.build(dtype)
        with mock.patch.object(adapted, "prepare_for_training", lambda model, **_: model.requires_grad_(False)):
            return self._base.build(dtype)

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        return self._base.stacks(module)

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        self._base.keep_layers(module, kept)

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: bool, window_filled: bool | None = None
    ) -> None:
        self._base.configure(module, attention=attention, checkpointing=checkpointing, window_filled=window_filled)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        return self._base.batch(micro_batch_size, seq_len)

    def root_modules(self, module: nn.Module) -> RootModules:
        return self._base.root_modules(module)

    def is_adapter(self, parameter: str) -> bool:
        return self._base.is_adapter(parameter)

    def config(self) -> dict[str, object]:
        return self._base.config()


def shifted_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *, upcasts: bool = True, **_: Any
) -> torch.Tensor:
    """The loss of transformers 4.48: logits (in fp32 if `upcasts`), and a contiguous copy of them without the last token."""
    wide = logits.float() if upcasts else logits
    shifted = wide[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, vocab_size), targets.view(-1), reduction="sum") / targets.numel()


def model_with(name: str, adaptation: Adaptation, variant: Variant) -> Resolved:
    """The model as a run with this code had it. Its tapes are recorded when they are needed, and kept in this process."""
    if variant == INSTALLED:
        return resolve(name)
    return _recorded(name, json.dumps(adaptation.as_dict(), sort_keys=True), variant)


@cache
def _recorded(name: str, adaptation: str, variant: Variant) -> Resolved:
    plain = resolve(name)
    assert plain.profile is not None
    changed = Adaptation.from_dict(json.loads(adaptation))
    config = {**plain.profile.config, CONFIG_KEY: changed.as_dict()} if changed else plain.profile.config
    recorder = Recorder(VariantSource(source_of(config, name=name, task=plain.profile.task), variant))
    profile = recorder.profile
    return Resolved(
        name=name,
        source="config",
        profile=profile,
        parameters=plain.parameters + profile.adapter_parameters,
        trainable_parameters=profile.trainable_parameters,
        recorder=recorder,
        adaptation=changed,
    )
