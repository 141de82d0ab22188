"""The model's outputs: their bytes, and whether DDP clones them."""

from __future__ import annotations

from fsdp_advisor.engines.wrapping import with_role
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Polynomial

NO_BYTES: Polynomial = (0, 0, 0, 0, 0, 0)


def clones_outputs(plan: Plan) -> bool:
    """Whether DDP clones the model's outputs: the Trainer makes it search for unused parameters unless it checkpoints.

    Source: transformers/trainer.py, _build_accelerator_args; torch/nn/parallel/distributed.py, _DDPSink.
    """
    return plan.facts.finds_unused_parameters and plan.world_size > 1 and plan.activation_checkpointing == "none"


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
