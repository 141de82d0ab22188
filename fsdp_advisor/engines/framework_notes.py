"""Notes on what an estimate under accelerate, the Trainer or torchtitan leaves out or assumes."""

from __future__ import annotations

from fsdp_advisor.engines.wrapping import HEAD, takes_root_apart, wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile

_EMBEDDINGS_NOT_SPLIT = ("masked-lm", "image-classification")
"""Tasks of the models (BERT, RoBERTa, ViT) whose `_no_split_modules` contain the embeddings. accelerate wraps these by
default."""


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what an estimate under accelerate, the Trainer or torchtitan leaves out or assumes."""
    if plan.facts.own_models:
        return [
            "torch.compile, which torchtitan 0.3 leaves off unless --compile.enable is given",
            "CUDA graphs, which torchtitan 0.3 makes unless --training.disable_cuda_graphs is given: a graph keeps its memory, and "
            "gradients then stay from step to step",
            "FlexAttention's masks of blocks, a few bytes per token, and the queries, keys and values of its first call, which "
            "torch.compile keeps",
        ]
    if not plan.uses_accelerate:
        return []
    notes = []
    if takes_root_apart(plan) and HEAD not in wrapping_for(profile, plan).parts:
        what = {
            "masked-lm": "accelerate 1.15 fails to wrap a head whose bias the module around it shares",
            "seq2seq-lm": "accelerate 1.15 fails to wrap an embedding that encoder and decoder share",
        }.get(profile.task, "accelerate makes units of its own around the layers")
        notes.append(f"{what}; this estimate counts one unit per layer and the root")
    if plan.backend in ("fsdp1", "fsdp2") and plan.wrap == "layer" and profile.task in _EMBEDDINGS_NOT_SPLIT:
        fails = ", and a head that is tied to them fails" if profile.task == "masked-lm" else ""
        notes.append(
            f"layers are units because the configuration names their class; without it the embeddings are one too{fails}"
        )
    if plan.backend == "deepspeed":
        notes.append(
            'bucket sizes and thresholds other than those that "auto" stands for in the DeepSpeed configuration'
        )
    if plan.framework == "accelerate":
        notes.append(
            "the memory of logits in a training loop that keeps the model's outputs after it has computed the loss"
        )
    else:
        notes.append(
            "tensors that a data collator adds to a batch, and batches that the Trainer loads in advance for one update"
        )
    if plan.precision == "fp16-mixed":
        notes.append("the gradient scaler's few scalars")
    return notes
