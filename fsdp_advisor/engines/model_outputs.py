"""The model's outputs: their bytes, and whether DDP clones them because it searches for unused parameters."""

from __future__ import annotations

from fsdp_advisor.engines.wrapping import with_role
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Polynomial

NO_BYTES: Polynomial = (0, 0, 0, 0, 0, 0)


def searches_unused(profile: Profile, plan: Plan) -> bool:
    """Whether DDP searches for unused parameters, and so clones the model's outputs: the Trainer makes it do so unless it checkpoints.
    Parameters without gradient (`learned`) need it, but with reentrant checkpoints it fails.

    Source: transformers/trainer.py, _build_accelerator_args; torch/nn/parallel/distributed.py, _DDPSink; trl/trainer/sft_trainer.py.
    """
    if plan.backend != "ddp" or plan.world_size == 1 or plan.checkpointing == "reentrant":
        return False
    by_itself = plan.facts.finds_unused_parameters and plan.activation_checkpointing == "none"
    return by_itself or any(parameter.idle for parameter in profile.in_order())


def logits_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of the logits: one row of the vocabulary per token. Not counted: the small logits of other tasks."""
    embedding = with_role(profile, "embedding")
    if not embedding or not profile.task.endswith(("-lm", "-seq2seq", "-to-text")):
        return NO_BYTES
    return (0, 0, 0, element_bytes * profile.root.parameters[embedding[0]].shape[0], 0, 0)


def encoded_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of `encoder_last_hidden_state`, which an encoder-decoder model returns with the logits."""
    width = profile.config.get("d_model")
    if "seq2seq" not in profile.task or not isinstance(width, int):
        return NO_BYTES
    if profile.task != "speech-seq2seq":
        return (0, 0, 0, element_bytes * width, 0, 0)
    frames = profile.config.get("max_source_positions")
    return (0, element_bytes * width * frames, 0, 0, 0, 0) if isinstance(frames, int) else NO_BYTES
