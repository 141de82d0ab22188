"""The batch and the loss with which each trainer runs a model."""

from __future__ import annotations

from fsdp_advisor.job.images import Images
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.batches import MaskedSource, with_batch
from fsdp_advisor.recording.evaluation import EvaluationSource, WithLogits
from fsdp_advisor.recording.experts import with_experts
from fsdp_advisor.recording.images import with_images
from fsdp_advisor.recording.llamafactory import WholeLogitsSource
from fsdp_advisor.recording.losses.source import with_loss
from fsdp_advisor.recording.preferences import PreferenceSource
from fsdp_advisor.recording.rewards import RewardSource
from fsdp_advisor.recording.source import Source, is_of_torchtitan


def source_of_step(source: Source, key: TapeKey) -> Source:
    """The source with the step of the key's trainer: its batch and loss, in training or in evaluation."""
    trained = _source_of_trainer(source, key)
    return EvaluationSource(trained) if key.evaluates else trained


def _source_of_trainer(source: Source, key: TapeKey) -> Source:
    """The source with the batch and the loss of the key's trainer."""
    if key.compiles and is_of_torchtitan(source):
        from fsdp_advisor.recording.torchtitan_models import CompiledSource

        source = CompiledSource(source)
    source = with_experts(source, key.experts, key.imbalance)
    source = with_images(source, Images(*key.images) if key.images else None)
    if key.task == "sft":
        passes_ones = key.batch == "full" and key.loss == "trl"  # TRL's mask of a batch without padding
        # compiled flash attention of transformers reads it and leaves it out
        reads = passes_ones and key.compiles and key.attention == "flash_attention_2"
        source = with_batch(source, "padded" if reads else key.batch, key.padding)
        if passes_ones and key.window_filled and not key.batch_is_one and not key.compiles:
            source = MaskedSource(source)
        source = with_loss(source, key.loss, key.ignored_labels, key.gathered_head, router_loss=key.router_loss)
        return WithLogits(source, converts=key.autocasts) if key.computes_logits else source
    if key.task == "reward":
        return RewardSource(source)
    if key.loss == "full":
        return WholeLogitsSource(source, key)
    # accelerate does not prepare FSDP's copy of the model, so only GRPO runs it under autocast
    autocasts = key.task == "grpo" or not key.autocasts_fsdp1
    return PreferenceSource(source, key, autocasts_copy=autocasts)
