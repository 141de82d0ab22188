"""LLaMA-Factory's steps of DPO and KTO, whose log-probabilities come from all logits in fp32.

The trained model's logits stay until the loss is computed, also during the forwards without gradients. All of KTO's completions are
assumed to be desirable.
Source: LLaMA-Factory 0.9.5, train/dpo/trainer.py and train/kto/trainer.py, `concatenated_forward`, `compute_reference_log_probs` and
`get_batch_loss_metrics`; train/trainer_utils.py, `get_batch_logps`; data/collator.py; trl 0.24, trainer/dpo_trainer.py, `dpo_loss`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_advisor.job.training_task import Reference, sequences_per_example
from fsdp_advisor.model.tape import ScoringPhase
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.preferences import WithoutDropout
from fsdp_advisor.recording.scoring import scoring, without_checkpointing
from fsdp_advisor.recording.source import Source

_NAMES = ("input_ids", "attention_mask", "labels")
"""The tensors of a batch; KTO has them also for the mismatched completions, whose names begin with kl_."""


class WholeLogitsSource(WithoutDropout):
    """A model that LLaMA-Factory trains on preferences."""

    def __init__(self, base: Source, key: TapeKey) -> None:
        super().__init__(base)
        self._task = key.task
        self._reference: Reference = key.reference

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        ids = self._base.batch(sequences_per_example(self._task) * micro_batch_size, seq_len)["input_ids"]
        prefixes = ("", "kl_") if self._task == "kto" else ("",)
        batch = {f"{prefix}{name}": torch.ones_like(ids) for prefix in prefixes for name in _NAMES}
        return batch | ({"kto_tags": torch.ones(micro_batch_size, dtype=torch.bool)} if self._task == "kto" else {})

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (_loss_of_kto if self._task == "kto" else _loss_of_dpo)(self, module, batch)

    @contextlib.contextmanager
    def as_reference(self, module: nn.Module) -> Iterator[None]:
        """Context in which forwards are those of the reference model: without the adapters, unless the reference is a copy."""
        with contextlib.nullcontext() if self._reference == "copy" else module.disable_adapter():  # type: ignore[operator]  # of PeftModel
            yield


def _scored(
    module: nn.Module, batch: dict[str, torch.Tensor], prefix: str = "", phase: ScoringPhase | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits, the log-probabilities of the labels, and their mean. In a `phase` without gradients and checkpointing."""
    batch = {name: value.clone() for name, value in batch.items()}  # `nested_detach`
    with contextlib.ExitStack() as context:
        if phase:
            context.enter_context(without_checkpointing(module))
            context.enter_context(scoring(phase))
        logits = module(input_ids=batch[f"{prefix}input_ids"], use_cache=False).logits.to(torch.float32)
        torch.clear_autocast_cache()  # accelerate's autocast ends with the forward
        log_probs, lengths = _log_probs(logits, batch[f"{prefix}labels"])
        return logits, log_probs, log_probs / lengths


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the labels' log-probabilities, and the numbers of labels."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :].contiguous()  # a copy that the kernel of log_softmax makes
    has_label = labels != -100
    labels.masked_fill_(labels == -100, 0)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (each * has_label).sum(-1), has_label.sum(-1)


def _loss_of_dpo(source: WholeLogitsSource, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, log_probs, _ = _scored(module, batch)
    with source.as_reference(module):
        _, of_reference, _ = _scored(module, batch, phase="reference")
    chosen, rejected = (log_probs - of_reference).chunk(2)
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    del logits
    return loss


def _loss_of_kto(source: WholeLogitsSource, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    kept, log_probs, mismatched = _compared(module, batch, None, "mismatched")
    with source.as_reference(module), torch.no_grad():
        _, of_reference, theirs = _compared(module, batch, "reference", "reference_mismatched")
    kl = (mismatched - theirs).mean().clamp(min=0)
    loss = (1 - torch.sigmoid(0.1 * ((log_probs - of_reference) - kl))).nanmean()
    del kept
    return loss


def _compared(
    module: nn.Module, batch: dict[str, torch.Tensor], phase: ScoringPhase | None, mismatched: ScoringPhase
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of the chosen completions, which are copied, and the log-probabilities of all and of the mismatched completions."""
    logits, log_probs, _ = _scored(module, batch, phase=phase)
    _, of_others, _ = _scored(module, batch, "kl_", mismatched)
    return logits.clone(), log_probs, of_others
