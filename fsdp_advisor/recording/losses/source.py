"""Causal language models with the loss of a library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from fsdp_advisor.errors import NotRecordable, assert_never
from fsdp_advisor.job.losses import LossCode
from fsdp_advisor.model.liger import LIGER_FAILURES, LIGER_LOSSES, LIGER_VERSION, LIGER_VISION
from fsdp_advisor.recording.losses import cce, liger, trl
from fsdp_advisor.recording.losses.fused import (
    FusedLoss,
    FusedLossSource,
    LossInputs,
    base_outputs,
    fused_loss_of,
    router_loss_of,
    set_loss,
)
from fsdp_advisor.recording.source import Source

TiledLoss = Literal["trl", "liger", "cce"]
_LOSSES: dict[TiledLoss, Callable[[LossInputs], torch.Tensor]] = {"trl": trl.loss, "liger": liger.loss, "cce": cce.loss}


class LossSource(FusedLossSource):
    """A language model, which may read images, whose forward computes a loss of TRL, Liger or cut cross entropy (`_LOSSES`).

    All three call `base_model` of either kind. Source: trl 1.16, trainer/utils.py, `_fused_forward`; Liger's `lce_forward`; axolotl's fork
    of cut cross entropy, which patches the types of integrations/cut_cross_entropy/README.md.
    """

    tasks = ("causal-lm", "image-text-to-text")
    not_causal = "losses in tiles are for language models, not for {task}"
    instead = "use --loss full"

    def __init__(
        self,
        base: Source,
        loss: TiledLoss,
        ignored_labels: float = 0.0,
        gathered_head: str = "",
        *,
        router_loss: bool = False,
    ) -> None:
        super().__init__(base, router_loss=router_loss)
        self._loss = loss
        self._ignored_labels = ignored_labels
        self._gathered_head = gathered_head

    def fuse(self, model: PreTrainedModel) -> None:
        if self._loss == "liger":
            self._check_liger(model.config.model_type)
        head, compute = model.get_output_embeddings(), _LOSSES[self._loss]
        self._fused = FusedLoss(head, compute, self._ignored_labels, self._gathered_head)
        # Liger leaves the cache to the configuration; the Trainer switches it off in that of the whole model, not in its language model's
        set_loss(model, self._fused, partial(_forward, use_cache=None) if self._loss == "liger" else _forward)

    def _check_liger(self, model_type: str) -> None:
        """Raise NotRecordable if Liger has no loss for models of this type, or fails with it."""
        if self.task == "causal-lm":
            if model_type not in LIGER_LOSSES:
                raise NotRecordable(
                    f"{self.name}: Liger {LIGER_VERSION} has no loss for models of type {model_type}",
                    hint="--loss cce works for every causal model",
                )
        elif model_type in LIGER_FAILURES:
            raise NotRecordable(
                f"{self.name}: with transformers 5.23, Liger {LIGER_VERSION} {LIGER_FAILURES[model_type]}",
                hint="leave --use-liger-kernel out, or use --loss full",
            )
        elif model_type not in LIGER_VISION:
            has = "Liger's loss is not modelled" if model_type in LIGER_LOSSES else f"Liger {LIGER_VERSION} has no loss"
            raise NotRecordable(
                f"{self.name}: {has} for models of type {model_type} with images",
                hint="leave --use-liger-kernel out, or use --loss full",
            )

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        self._fused.examples = micro_batch_size, seq_len
        return super().batch(micro_batch_size, seq_len)


def with_loss(
    source: Source,
    loss: LossCode,
    ignored_labels: float = 0.0,
    gathered_head: str = "",
    *,
    router_loss: bool = False,
) -> Source:
    """The source with this loss. `ignored_labels`: the fraction of the labels that are -100. `gathered_head`, `router_loss`: see `TapeKey`.

    Its `configure` raises NotRecordable for a model that is not a causal language model.
    """
    match loss:
        case "full":
            return source
        case "torchtitan":
            from fsdp_advisor.recording.torchtitan_models import ChunkedLossSource

            return ChunkedLossSource(source)
        case "trl" | "liger" | "cce":
            return LossSource(source, loss, ignored_labels, gathered_head, router_loss=router_loss)
        case _:
            return assert_never(loss)


def _forward(
    self: PreTrainedModel, labels: torch.Tensor, *, use_cache: bool | None = False, **inputs: Any
) -> CausalLMOutput:
    outputs = base_outputs(self, use_cache=use_cache, **inputs)
    loss = fused_loss_of(self)(outputs.last_hidden_state, labels)
    of_routers = router_loss_of(self, outputs)
    return CausalLMOutput(loss=loss if of_routers is None else loss + of_routers)
