"""Batches with padding, with a mask of ones, and batches flattened into one row."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import masking_utils

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.batch_layout import BatchLayout
from fsdp_advisor.model.tape_key import TapeCheckpointing
from fsdp_advisor.recording import flash
from fsdp_advisor.recording.source import Source, WrappedSource


class BatchSource(WrappedSource):
    """A model whose batches are padded, or flattened into one row.

    Padded: transformers 5.23, data/data_collator.py, `DataCollatorWithPadding`; trl 1.16, sft_trainer.py,
    `DataCollatorForLanguageModeling`. Flattened: the latter with `padding_free`, or transformers' `DataCollatorWithFlattening`.
    """

    def __init__(self, base: Source, layout: BatchLayout, padding: float) -> None:
        """`padding`: the fraction of a padded batch's tokens that are padding. Only flash_attention_2 depends on it."""
        super().__init__(base)
        self._layout: BatchLayout = layout
        self._padding = padding

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        if self._layout != "padded" and self.task not in ("causal-lm", "image-text-to-text"):
            raise NotRecordable(
                f"{self.name}: sequences in one row are for models that generate text, not for {self.task} models",
                hint="leave --packing and --padding-free out",
            )
        attention = flash.VARLEN if attention == "flash_attention_2" else attention
        self._base.configure(module, attention=attention, checkpointing=checkpointing, window_filled=window_filled)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        flash.use_rows(flash.Rows(self._layout, micro_batch_size, self._padding))
        batch = self._base.batch(micro_batch_size, seq_len)
        if "input_ids" not in batch:
            raise NotRecordable(
                f"{self.name}: batches of {self.task} models have no padding", hint="leave --padding-fraction out"
            )
        if self._layout == "padded":
            return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
        batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
        batch["position_ids"] = torch.zeros_like(batch["input_ids"])
        if self._layout == "flattened-trl":
            for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
                batch[name] = torch.zeros(micro_batch_size + 1, dtype=torch.int32)
            batch["seq_idx"] = torch.zeros_like(batch["input_ids"], dtype=torch.int32)
        self._longest = seq_len
        return batch

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._layout != "flattened-trl":
            return self._base.loss(module, batch)
        numbers = dict.fromkeys(("max_length_q", "max_length_k"), self._longest)
        return self._base.loss(module, {**batch, **numbers})  # type: ignore[dict-item]  # models also take numbers


class MaskedSource(WrappedSource):
    """A model whose batches have no padding, but a mask of ones. It leaves out the mask of layers that attend to all earlier tokens, as
    without it; that of a sliding window has a copy for each sequence.
    """

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        batch = self._base.batch(micro_batch_size, seq_len)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with mock.patch.object(masking_utils, "_ignore_causal_mask_sdpa", _ignored_without_padding):
            return self._base.loss(module, batch)


_ignored = masking_utils._ignore_causal_mask_sdpa


def _ignored_without_padding(padding_mask: torch.Tensor | None, *arguments: Any, **keywords: Any) -> bool:
    """The result of transformers' function for a mask of ones, whose values it reads, which is impossible under fake tensors."""
    return bool(_ignored(None, *arguments, **keywords))


def with_batch(source: Source, layout: BatchLayout, padding: float = 0.0) -> Source:
    """The source with batches of this layout."""
    return source if layout == "full" else BatchSource(source, layout, padding)
