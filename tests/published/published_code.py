"""Training code as published runs had it, where it allocates other tensors than the installed versions.

A `Variant` changes what happens between a model's hidden states and its loss; the layers are those of the installed versions.
"""

from __future__ import annotations

import json
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
from fsdp_advisor.recording.source import Source, WrappedSource


class VariantSource(WrappedSource):
    """A source with the loss of a variant."""

    def __init__(self, base: Source, variant: Variant) -> None:
        super().__init__(base)
        self._variant = variant

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
            return super().build(dtype)
        with mock.patch.object(adapted, "prepare_for_training", lambda model, **_: model.requires_grad_(False)):
            return super().build(dtype)


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
