"""AdaLoRA's regularization, which reads the adapters' matrices a second time after the model's forward.

Source: peft 0.21, tuners/adalora/model.py, `forward`.
"""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.compatibility import label
from fsdp_advisor.job.frameworks import BACKEND_NAMES
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile


def adalora_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why the plan's engine cannot train a model with AdaLoRA; None if it can, or if the model has none.

    Each was run: after a reshard the matrices are empty, and PEFT fails. With reentrant checkpointing their gradients are complete twice,
    after the regularization and after the layer, which DDP and DeepSpeed's ZeRO-2 refuse. ZeRO-1 accepts it.
    """
    if not any(".lora_E." in p.name for p, _ in profile.counted_parameters()):
        return None
    is_deepspeed = plan.backend == "deepspeed"
    name = label(plan.strategy) if is_deepspeed else BACKEND_NAMES[plan.backend]
    if plan.strategy == "zero3" if is_deepspeed else plan.reshards and plan.shard_degree > 1:
        return UsageError(
            f"AdaLoRA fails if {name} reshards after forward: PEFT reads whole adapter matrices after it",
            hint="--strategy ddp or zero2, or LoRA: --use-peft",
        )
    if plan.activation_checkpointing == "reentrant" and (
        is_deepspeed or (plan.backend == "ddp" and plan.world_size > 1)
    ):
        verb = "is not modelled with" if plan.strategy == "zero1" else "is refused by"
        return UsageError(
            f"reentrant checkpointing computes gradients of AdaLoRA's matrices twice in a backward, which {verb} {name}",
            hint="--activation-checkpointing full",
        )
    return None
