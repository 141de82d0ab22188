"""A causal language model with the step of TRL's preference trainers: a reference model's forwards run before the loss.

The recorded reference is the same module without gradients, because its allocations do not depend on the weights. Its parameters are not
on the tape (engines add them), but casts of them are.
Source: trl 1.16, trainer/dpo_trainer.py, `DataCollatorForPreference`; trainer/kto_trainer.py, `DataCollatorForUnpairedPreference`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.model.tape import ScoringPhase
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.losses import trl
from fsdp_advisor.recording.losses.fused import (
    FusedLoss,
    FusedLossSource,
    LossInputs,
    base_outputs,
    fused_loss_of,
    router_loss_of,
    set_loss,
)
from fsdp_advisor.recording.on_gpu import as_on_gpu
from fsdp_advisor.recording.rollouts import batch_of, loss_of_grpo
from fsdp_advisor.recording.scoring import scoring, scoring_phase, without_checkpointing
from fsdp_advisor.recording.source import Source, WrappedSource

NAMES = ("input_ids", "attention_mask", "completion_mask")
REFERENCES: dict[TrainingTask, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("ref_chosen_logps", "ref_rejected_logps"),
    "kto": ("ref_logps", "ref_KL_logps"),
}
"""The inputs of a batch in which the reference's log-probabilities are precomputed, by task."""
ASKED: dict[TrainingTask, tuple[str, ...]] = {
    "sft": (),
    "dpo": trl.OUTPUTS,
    "kto": trl.OUTPUTS[:3],
    "grpo": trl.OUTPUTS[:2],
}
"""The outputs that a trainer requests from the trained model's head, by task. From a reference copy it requests only log-probabilities."""


class PreferenceSource(FusedLossSource):
    """A model whose loss compares log-probabilities: of pairs of sequences (DPO), or of completions and mismatched ones (KTO)."""

    tasks = ("causal-lm", "image-text-to-text")
    not_causal = "TRL compares log-probabilities of causal language models, not of {task} models"
    instead = "use --task sft"

    def __init__(self, base: Source, key: TapeKey, *, autocasts_copy: bool) -> None:
        """`autocasts_copy`: whether the reference model's forward runs under autocast if the trained one's does."""
        super().__init__(base, router_loss=key.router_loss)
        self.key = key
        self._reference = key.reference
        self._sequences = sequences_per_example(key.task)
        self._autocasts_copy = autocasts_copy
        if key.completion_length:  # a prompt has at least one token
            self.min_seq_len = max(self.min_seq_len, key.completion_length + 1)

    def fuse(self, model: PreTrainedModel) -> None:
        key = self.key
        if key.task != "grpo":
            disable_dropout(model)
        head = model.get_output_embeddings()
        gathers = key.gathered_head if key.gathered_head != "generation" else ""
        fused = FusedLoss(head, self._scored, key.ignored_labels, gathers, key.completion_length)
        set_loss(model, fused, _forward)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        sequences = self.key.generated if self.key.task == "grpo" else self._sequences
        ids = self._base.batch(sequences * micro_batch_size, seq_len)["input_ids"]
        if self.key.task == "grpo":
            has_reference = self._reference != "none"
            return batch_of(ids, self.key.completion_length, policy=self.key.scores_policy, reference=has_reference)
        prefixes = ("", "KL_") if self.key.task == "kto" else ("",)
        batch = {f"{p}{name}": torch.ones_like(ids) for p in prefixes for name in NAMES}
        if self._reference == "none":
            batch |= {name: torch.zeros(micro_batch_size) for name in REFERENCES[self.key.task]}
        if self.key.task == "kto":
            batch["label"] = torch.ones(micro_batch_size, dtype=torch.bool)
        return batch

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses = {"dpo": _loss_of_dpo, "kto": _loss_of_kto, "grpo": loss_of_grpo}
        return losses[self.key.task](self, module, batch)

    def precomputed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """The reference model's log-probabilities if they are part of the batch, else None."""
        return tuple(batch[name] for name in REFERENCES[self.key.task]) if self._reference == "none" else None

    @contextlib.contextmanager
    def as_reference(self, module: nn.Module) -> Iterator[None]:
        """Context in which forwards are those of the reference model: without the adapters, unless the reference is a copy.

        A copy is not compiled under FSDP2, where TRL shards it itself, and DDP does not wrap it. Without adapters, the trainer calls the
        model that it was given, as GRPO's does.
        Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `prepare_fsdp` or accelerate's `prepare_model`, `evaluation_mode=True`;
        `_compute_loss`.
        """
        is_copy = self._reference == "copy"
        autocasts = torch.is_autocast_enabled("cpu") and (not is_copy or self._autocasts_copy)
        with (
            _compiled_copy(module, self.key) if is_copy and self.key.compiles else self.as_scored_policy(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocasts),
            contextlib.nullcontext() if is_copy else module.disable_adapter(),  # type: ignore[operator]  # of PeftModel
        ):
            yield

    def as_scored_policy(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the trained model scores completions before the step. GRPO's trainer calls the model that it was given for this.
        Only under FSDP2 is that the model that accelerate compiled.

        Source: trl 1.16, trainer/grpo_trainer.py, `_generate_and_score_completions`; transformers 5.23, trainer.py, `self.model =
        self.model_wrapped = model`.
        """
        key = self.key
        return _uncompiled(key) if key.compiles and key.engine != "fsdp2" else contextlib.nullcontext()

    def _scored(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        is_copy = self._reference == "copy" and (scoring_phase() or "").startswith("reference")
        outputs = ("log_probs",) if is_copy else ASKED[self.key.task]
        return trl.log_probs(
            inputs, outputs=outputs, sequences=self._sequences, completion_length=self.key.completion_length
        )


class WithoutDropout(WrappedSource):
    """A source whose model is trained without dropout."""

    def configure(self, module: nn.Module, **code_path: Any) -> None:
        super().configure(module, **code_path)
        disable_dropout(module)


def disable_dropout(module: nn.Module) -> None:
    """Switch dropout off, as TRL's `disable_dropout_in_model` does for these tasks by default."""
    for inner in module.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0


def _log_probs(
    module: nn.Module, ids: torch.Tensor, labels: torch.Tensor, phase: ScoringPhase | None = None
) -> dict[str, torch.Tensor]:
    """The outputs of a forward; in a `phase`, without gradients and checkpointing. accelerate's autocast ends with the forward."""
    with contextlib.ExitStack() as context:
        if phase:
            context.enter_context(without_checkpointing(module))
            context.enter_context(scoring(phase))
        outputs: dict[str, torch.Tensor] = module(input_ids=ids, labels=labels)
    torch.clear_autocast_cache()
    return outputs


@contextlib.contextmanager
def _compiled_copy(module: nn.Module, key: TapeKey) -> Iterator[None]:
    """Context in which compiled modules run as those of a reference copy: their own code under FSDP2, else compiled outside of DDP."""
    from fsdp_advisor.recording.compiled import outside_ddp  # Inductor takes a second to import

    with _uncompiled(key) if key.engine == "fsdp2" else outside_ddp(module):
        yield


@contextlib.contextmanager
def _uncompiled(key: TapeKey) -> Iterator[None]:
    """Context in which compiled modules run as their own code."""
    with torch.compiler.set_stance("force_eager"), as_on_gpu(by_cudnn=key.kernel == "cudnn"):
        yield


def _labels(batch: dict[str, torch.Tensor], prefix: str = "") -> torch.Tensor:
    return batch[f"{prefix}input_ids"].masked_fill(batch[f"{prefix}completion_mask"] == 0, -100)


def _loss_of_dpo(source: PreferenceSource, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of DPO. Source: trl 1.16, trainer/dpo_trainer.py, `_compute_loss`."""
    labels = _labels(batch)
    outputs = _log_probs(module, batch["input_ids"], labels)
    chosen, rejected = outputs["log_probs"].sum(dim=1).chunk(2, dim=0)
    references = source.precomputed(batch)
    if references is None:
        with source.as_reference(module):
            scored = _log_probs(module, batch["input_ids"], labels, "reference")["log_probs"]
        references = scored.sum(dim=1).chunk(2, dim=0)
    delta = (chosen - references[0]) - (rejected - references[1])
    return with_router_loss((-F.logsigmoid(0.1 * delta)).mean() * 1.0, outputs)


def _loss_of_kto(source: PreferenceSource, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of KTO. All completions are assumed to be desirable. Source: trl 1.16, trainer/kto_trainer.py, `_compute_loss`."""

    def mismatched(phase: ScoringPhase) -> torch.Tensor:
        return _log_probs(module, batch["KL_input_ids"], _labels(batch, "KL_"), phase)["log_probs"].sum(-1)

    own = mismatched("mismatched")
    labels = _labels(batch)
    outputs = _log_probs(module, batch["input_ids"], labels)
    completions = outputs["log_probs"].sum(-1)
    references = source.precomputed(batch)
    if references is None:
        with source.as_reference(module):
            theirs = mismatched("reference_mismatched")
            scored = _log_probs(module, batch["input_ids"], labels, "reference")["log_probs"].sum(-1)
        references = scored, theirs
    kl = (own - references[1]).mean().clamp(min=0)
    return with_router_loss((1 - torch.sigmoid(0.1 * ((completions - references[0]) - kl))).nanmean(), outputs)


def _forward(self: PreTrainedModel, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
    """The outputs of TRL's head; without labels the logits of the last token, which `generate` needs."""
    if labels is None:
        hidden = self.base_model(**inputs, use_cache=True).last_hidden_state
        return self.get_output_embeddings()(hidden[:, -1:, :])
    outputs = base_outputs(self, **inputs)
    found: dict[str, torch.Tensor] = fused_loss_of(self)(outputs.last_hidden_state, labels)
    of_routers = router_loss_of(self, outputs)
    return found if of_routers is None else {**found, "router_loss": of_routers}


def with_router_loss(loss: torch.Tensor, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss with that of the routers, if the outputs have one."""
    return loss + outputs["router_loss"] if "router_loss" in outputs else loss
