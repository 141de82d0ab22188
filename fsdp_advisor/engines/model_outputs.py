"""The model's outputs: their bytes, and whether DDP clones them because it searches for unused parameters."""

from __future__ import annotations

from fsdp_advisor.engines.wrapping import with_role
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import ZERO, Category, Chunked, Divided, Polynomial, Staging, Tape, Tiled, value_at
from fsdp_advisor.policies.dtypes import FP32_BYTES, loaded_bytes


def searches_by_default(plan: Plan, *, adapted: bool) -> bool:
    """Whether the framework makes DDP search for unused parameters unless its arguments say otherwise. `adapted`: PEFT's model is trained.

    The Trainer does unless the model checkpoints, and does not see that a model of PEFT does. LLaMA-Factory does not with adapters.
    Source: transformers/trainer.py, _build_accelerator_args; LLaMA-Factory, hparams/parser.py, get_train_args.
    """
    if adapted:
        return plan.facts.finds_unused_with_adapters
    return plan.facts.finds_unused_parameters and plan.activation_checkpointing == "none"


def searches_unused(profile: Profile, plan: Plan) -> bool:
    """Whether DDP searches for unused parameters, and so clones the model's outputs. Parameters without gradient (`learned`) need it, but
    with reentrant checkpoints it fails, so exported files switch it off.

    Source: torch/nn/parallel/distributed.py, _DDPSink; trl/trainer/sft_trainer.py.
    """
    if plan.backend != "ddp" or plan.world_size == 1 or plan.checkpointing == "reentrant":
        return False
    by_default = searches_by_default(plan, adapted=bool(profile.adapter_parameters))
    return by_default or any(parameter.idle for parameter in profile.in_order())


def logits_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of the logits: one row of the vocabulary per token. Not counted: the small logits of other tasks."""
    embedding = with_role(profile, "embedding")
    if not embedding or not profile.task.endswith(("-lm", "-seq2seq", "-to-text")):
        return ZERO
    return (0, 0, 0, element_bytes * profile.root.parameters[embedding[0]].shape[0], 0, 0)


def logits_on(tape: Tape, profile: Profile, *, converted: bool) -> Polynomial:
    """Bytes of the logits of a step whose loss computes with all of them. `converted`: of the copy in fp32 of logits in half precision.

    They are the first storage of the loss with at least half the bytes of its largest one, which is in fp32. The plan does not tell their
    size: a quantized model has its head in fp32, and prompt tuning adds tokens.
    """
    if not any(logits_per_batch(profile, 1)):
        return ZERO
    born = (births for segment, births in zip(tape.segments, tape.births, strict=True) if segment.phase != "backward")
    sizes = [tape.sizes[size] for births in born for size, category in births if category == Category.LOSS]
    plain = [size for size in sizes if not isinstance(size, (Chunked, Staging, Tiled, Divided))]
    half = max((value_at(size, 1, 1024) for size in plain), default=0) / 2
    c1, cb, ct, cbt, cbt2, ct2 = next((size for size in plain if value_at(size, 1, 1024) >= half), ZERO)
    return (2 * c1, 2 * cb, 2 * ct, 2 * cbt, 2 * cbt2, 2 * ct2) if converted else (c1, cb, ct, cbt, cbt2, ct2)


def output_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes per element of the outputs of a model that computes in the dtype of its weights. All but the quantized ones may be in fp32."""
    embedding = with_role(profile, "embedding")
    return loaded_bytes(plan, profile.root.parameters[embedding[0]]) if embedding else plan.param_bytes


def encoded_per_batch(profile: Profile, plan: Plan) -> Polynomial:
    """Bytes of `encoder_last_hidden_state`, which an encoder-decoder model returns with the logits, in the dtype of its weights."""
    width = profile.config.get("d_model")
    if "seq2seq" not in profile.task or not isinstance(width, int):
        return ZERO
    element_bytes = FP32_BYTES if plan.mixed else output_bytes(profile, plan)
    if profile.task != "speech-seq2seq":
        return (0, 0, 0, element_bytes * width, 0, 0)
    frames = profile.config.get("max_source_positions")
    return (0, element_bytes * width * frames, 0, 0, 0, 0) if isinstance(frames, int) else ZERO
