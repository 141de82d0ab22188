"""Notes on what an estimate under accelerate, the Trainer or torchtitan leaves out or assumes."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_advisor.engines.wrapping import HEAD, takes_root_apart, wrapping_for
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.job.compilation import leaves_layers_uncompiled
from fsdp_advisor.job.lora_kernels import kernels_not_modelled
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.units import format_bytes

_EMBEDDINGS_NOT_SPLIT = ("masked-lm", "image-classification")
"""Tasks of the models (BERT, RoBERTa, ViT) whose `_no_split_modules` contain the embeddings. accelerate wraps these by
default.
"""


WITHOUT_NUM_EXPERTS = ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "phimoe")
"""Types of models with a weight of the routers' loss whose configurations, also of dense models, have no `num_experts`, which TRL reads.

Source: trl 1.16, trainer/utils.py, `add_fused_lm_head`; transformers 5.23, the configurations.
"""


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """Notes on what an estimate under accelerate, the Trainer or torchtitan leaves out or assumes."""
    if plan.facts.own_models:
        if plan.compile != "none":
            return []
        return [
            "torch.compile, which torchtitan 0.3 leaves off unless --compile.enable is given (--compile layer)",
            "FlexAttention's masks of blocks, a few bytes per token, and the queries, keys and values of its first call, which "
            "torch.compile keeps",
        ]
    notes = _router_loss_notes(profile, plan)
    if not plan.uses_accelerate:
        return notes
    if takes_root_apart(plan) and HEAD not in wrapping_for(profile, plan).parts:
        what = {
            "masked-lm": "accelerate 1.15 fails to wrap a head whose bias is also a parameter of its parent module",
            "seq2seq-lm": "accelerate 1.15 fails to wrap an embedding that encoder and decoder share",
        }.get(profile.task, "accelerate makes units of its own around the layers")
        notes.append(f"{what}; this estimate counts one unit per layer and the root")
    if plan.backend in ("fsdp1", "fsdp2") and plan.wrap == "layer" and profile.task in _EMBEDDINGS_NOT_SPLIT:
        fails = ", and a head that is tied to them fails" if profile.task == "masked-lm" else ""
        notes.append(
            f"layers are units because the configuration names their class; without it the embeddings are one too{fails}"
        )
    if plan.backend == "deepspeed" and plan.zero_buckets is None:
        notes.append(
            'bucket sizes and thresholds in the DeepSpeed configuration other than "auto"; zero_buckets gives them'
        )
    if plan.framework == "accelerate":
        notes.append(
            "the memory of logits in a training loop that keeps the model's outputs after it has computed the loss"
        )
    else:
        notes.append(
            "tensors that a data collator adds to a batch, and batches that the Trainer loads in advance for one update"
        )
    if leaves_layers_uncompiled(plan):
        notes.append(
            "compiled layers: FSDP2's hooks within accelerate's checkpoints (fsdp_activation_checkpointing) break the graph, so the layers"
            " run uncompiled; they are compiled with the model's gradient_checkpointing_enable"
        )
    elif plan.compile != "none" and plan.backend == "fsdp2" and plan.checkpointing != "none":
        notes.append(
            "activation_checkpointing in fsdp_config, with which the layers are not compiled and keep more than with gradient_checkpointing"
        )
    if plan.precision == "fp16-mixed":
        notes.append("the gradient scaler's few scalars")
    if plan.framework == "axolotl":
        notes += _axolotl_notes(profile, plan)
    return notes


def _router_loss_notes(profile: Profile, plan: Plan) -> list[str]:
    """Notes on a load-balancing loss of the routers that is not in the estimate."""
    config = profile.config
    model_type = config.get("model_type")
    if plan.framework != "trl":
        asked = config.get("output_router_logits") and profile.experts is not None
        return (
            ["the routers' loss of all layers, for which output_router_logits in the configuration asks"]
            if asked
            else []
        )
    if not plan.adds_router_loss:
        return []
    if model_type in WITHOUT_NUM_EXPERTS:
        return [
            f"the routers' loss: TRL 1.16 fails to compute it for {model_type}, whose configuration has no num_experts; set "
            "router_aux_loss_coef to 0.0"
        ]
    if plan.router_aux_loss_coef and config.get("router_aux_loss_coef") == 0:
        return ["the routers' loss, whose weight in the model's configuration is 0"]
    return []


def _axolotl_notes(profile: Profile, plan: Plan) -> list[str]:
    """Notes on parameters that axolotl stores in fp32 and the estimate counts in bf16.

    Without FSDP it converts norms, embeddings, head and routers to fp32, and PEFT converts all weights that are not packed to fp32. Then
    it converts norms, embeddings and head back to bf16 if the model has adapters, or if its attention kernel or loss needs bf16. DeepSpeed
    casts all of them. Source: axolotl 0.19.0, loaders/model.py, `_configure_embedding_dtypes`, and loaders/adapter.py, `load_adapter`.
    """
    notes = []
    adaptation = profile.config.get(CONFIG_KEY)
    missing = kernels_not_modelled(plan, Adaptation.from_dict(adaptation)) if isinstance(adaptation, Mapping) else None
    if missing is not None:
        notes.append(
            f"axolotl's kernels for adapters with {missing}: the estimate has PEFT's code, which keeps more for backward"
        )
    adapts = bool(profile.adapter_parameters)
    if plan.backend != "ddp" or not plan.stores_half:
        return notes
    if not adapts and plan.attention in ("sdpa", "eager") and plan.loss_code != "cce":
        n_bytes = profile.bytes_of(lambda p: 4 if _is_converted(p) else 0)
        notes.append(
            f"fp32 norms, embeddings and head, which axolotl makes with attention {plan.attention}: {format_bytes(n_bytes)} more for "
            "their weights and gradients, fp32 optimizer state of them and fp32 hidden states; flash_attention_2 keeps them in bf16"
        )
    packed = any(p.role == "quantized" for p, _ in profile.counted_parameters())
    if packed and (n_bytes := profile.bytes_of(lambda p: 2 if _stays_fp32(p) else 0)) > profile.parameters // 100:
        notes.append(
            f"weights outside linear layers, such as experts, which axolotl stores in fp32 under DDP: {format_bytes(n_bytes)} more"
        )
    return notes


def _is_converted(parameter: Parameter) -> bool:
    """Whether axolotl converts the parameter with the norms, the embeddings and the head."""
    return parameter.role in ("embedding", "head") or "norm" in parameter.name


def _stays_fp32(parameter: Parameter) -> bool:
    """Whether a frozen weight of a model with packed weights stays in fp32. A layer casts its bias to the compute dtype."""
    is_own = not parameter.trainable and parameter.role != "quantized" and not parameter.name.endswith(".bias")
    return is_own and not _is_converted(parameter)
