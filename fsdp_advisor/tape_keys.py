"""The keys of a plan's tapes: of the step under fake tensors on a CPU, and of the step with a GPU's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.engines.wrapping import (
    head_gathered_by_generation,
    head_gathered_by_loss,
    takes_root_apart,
    tape_wrap,
)
from fsdp_advisor.errors import NoSuchAttention, NotPolynomial, UsageError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.adaptation import CONFIG_KEY, may_adapt
from fsdp_advisor.job.choices import DEFAULT_SEQ_LEN, Backend, Precision
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.compilation import leaves_layers_uncompiled
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.tiled_mlp import tiled_mlp_code
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.model import catalog
from fsdp_advisor.model.attention import mixes_head_widths
from fsdp_advisor.model.experts import experts_code
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key, gpu_tape_keys
from fsdp_advisor.model.kernels import loops_without, missing_packages, runs_tokens_on_gpu
from fsdp_advisor.model.lora_kernels import kernels_of_model
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import catalogued
from fsdp_advisor.model.tape_key import (
    GatheredHead,
    TapeCompile,
    TapeEngine,
    TapeKey,
    TapePrecision,
)
from fsdp_advisor.policies.dtypes import stored_bytes

_ENGINES: dict[Backend, TapeEngine] = {"fsdp1": "fsdp1", "fsdp2": "fsdp2"}
_PRECISIONS: dict[Precision, TapePrecision] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "bf16-mixed",  # the same sizes
    "fp32": "fp32",
}


def needs_recording(request: EstimateRequest) -> bool:
    """Whether the answer needs a step that the catalog does not have, so that PyTorch has to record it.

    False for a model that is not in the catalog, whose steps are recorded anyway.
    """
    entry = catalogued(request.model)
    if entry is None:
        return False
    is_thorough = isinstance(request, RecommendRequest) and request.thorough
    if is_thorough or may_adapt(request) or request.eval_strategy != "no":
        return True
    # the model decides whether they matter
    if request.wrap != "layer" or request.experts_implementation != "grouped_mm" or not request.use_orig_params:
        return True
    if request.kernel_packages != "all":
        return True
    try:
        job = request.as_estimate if isinstance(request, RecommendRequest) else request
        asked = plans(job, seq_len=job.seq_len or DEFAULT_SEQ_LEN)
    except UsageError:  # the answer will be this error
        return False
    keys = [(tape_key_of(plan), plan) for plan in asked]
    if not all(key.is_in_catalog(entry.tapes) for key, _ in keys):
        return True
    profile = catalog.profile(entry)
    by_batch = [plan for key, plan in keys if gpu_sizes_are_not_polynomials(profile, key)]
    if isinstance(request, RecommendRequest):
        return bool(by_batch)
    return not all(_has_own_batch(profile, plan) for plan in by_batch)


def gpu_sizes_are_not_polynomials(profile: Profile, key: TapeKey) -> bool:
    """Whether the sizes of a step on a GPU are known not to be polynomials: the model's code runs each token in turn, or a recording has
    shown it. Then they are not on any code path with the key's images, over which a vision tower may loop.
    """
    if runs_tokens_on_gpu(profile):
        return True
    kind = NotPolynomial.__name__
    refused = [TapeKey.from_name(name) for name, refusal in profile.refusals.items() if refusal["kind"] == kind]
    return any(other.device == "gpu" and other.images == key.images for other in refused)


def _has_own_batch(profile: Profile, plan: Plan) -> bool:
    """Whether the catalog has the plan's step for its own micro-batch and length."""
    return with_available_attention(profile, replace(tape_key_of(plan), at=plan.tape_shape)).name in profile.tapes


def with_available_attention(profile: Profile, key: TapeKey) -> TapeKey:
    """The key, with eager attention instead of sdpa if a recording has shown that the model's code has no sdpa."""
    lacks_sdpa = key.attention == "sdpa" and any(
        refusal["kind"] == NoSuchAttention.__name__ and TapeKey.from_name(name).attention == "sdpa"
        for name, refusal in profile.refusals.items()
    )
    return replace(key, attention="eager") if lacks_sdpa else key


def tape_key_of(plan: Plan, profile: Profile | None = None) -> TapeKey:
    """The key of the tape that a plan replays. The tape is a CPU tape, except for flash_attention_2, which runs only on GPUs.

    `profile`: the model, on which the units of a wrap policy other than `layer` depend.
    """
    return _with_loss(_with_options(_code_path(plan, profile), plan, profile), plan, profile)


def _code_path(plan: Plan, profile: Profile | None) -> TapeKey:
    """The key as far as engine, precision, attention, checkpointing and units decide it."""
    engine = _ENGINES.get(plan.backend, "plain")
    if plan.backend == "fsdp1" and plan.facts.autocasts_fsdp1 and plan.mixed:
        engine = "fsdp1+autocast"
    precision = _PRECISIONS[plan.precision]
    if plan.backend == "deepspeed" and plan.mixed:
        precision = "bf16"
    if plan.backend == "deepspeed" and profile is not None and profile.mixes_dtypes:
        engine = "plain+cast"
    if plan.stores_half and (plan.backend == "ddp" or (engine == "fsdp2" and profile and profile.has_usual_buffers)):
        precision = "bf16-weights-mixed"
    wrap = tape_wrap(profile, plan) if profile is not None else ""
    one = plan.tape_shape[0] * sequences_per_example(plan.task) == 1
    checkpointing = "full-accelerate" if _accelerate_checkpoints(plan, profile) else plan.checkpointing
    if plan.attention == "flash_attention_2":  # its kernel runs the same code for every B
        return TapeKey(engine, precision, plan.attention, checkpointing, device="gpu", wrap=wrap)
    return TapeKey(engine, precision, plan.attention, checkpointing, one, wrap=wrap)


def _accelerate_checkpoints(plan: Plan, profile: Profile | None) -> bool:
    """Whether accelerate's FSDP2 checkpoints the layers of a compiled model, or of one whose embedding is frozen.

    Without compilation, if the embedding is trained, the step equals that of `gradient_checkpointing_enable`, which makes the embedding's
    output require a gradient. The Trainer and TRL have both; their exported files use the latter for such a model
    (`export.checkpointing`). axolotl makes the output require a gradient by itself.

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_apply_ac`; transformers 5.23, modeling_utils.py, `gradient_checkpointing_enable`.
    """
    if plan.framework != "accelerate" or plan.backend != "fsdp2" or plan.checkpointing != "full" or profile is None:
        return False
    if leaves_layers_uncompiled(plan):
        return True
    if plan.activation_offload:
        return False
    return any(p.role == "embedding" and not p.trainable for p in profile.root.parameters)


def _with_options(key: TapeKey, plan: Plan, profile: Profile | None) -> TapeKey:
    """The key with the options of the step that change its tensors, other than the loss."""
    zero3_linear = plan.backend == "deepspeed" and plan.strategy == "zero3"
    changes: dict[str, Any] = {
        "activation_offload": plan.offload_code,
        "evaluates": plan.evaluates,
        "computes_logits": plan.computes_logits,
        "fp8": plan.fp8,
        "liger_kernels": plan.use_liger_kernel,
        "images": plan.images,
        "batch": plan.batch_layout,
        "flat_parameters": profile is not None and plan.steps_flat_parameters and _shows_in_the_graph(profile, plan),
        "lora_kernels": ""
        if profile is None
        else ",".join(kernels_of_model(plan, profile.config, profile.parameter_names())),
        # axolotl 0.19.0, loaders/adapter.py, `load_adapter`, calls enable_input_require_grads; checkpointing does so itself
        "input_gradients": plan.framework == "axolotl"
        and plan.checkpointing == "none"
        and profile is not None
        and bool(profile.adapter_parameters),
        "saves_linear_inputs": zero3_linear and profile is not None and _freezes_weights(profile),
    }
    if plan.fp8 == "mxfp8":  # scales are padded to whole blocks of 128 rows
        changes["at"] = plan.tape_shape
    if plan.compile != "none":
        changes |= {"compile": _compiled_code(plan), "memory_budget": plan.memory_budget, "at": plan.tape_shape}
    if plan.tiled_mlp != "none":  # shards differ by one token
        changes |= {"tiled_mlp": f"{tiled_mlp_code(plan)}:{plan.tiled_mlp}", "at": plan.tape_shape}
    if profile is not None and (code := experts_code(profile, plan.experts_implementation)) is not None:
        changes["experts"] = code
        if code == "eager":  # sizes depend on the tokens of each expert
            changes |= {"imbalance": plan.expert_imbalance, "at": plan.tape_shape}
    if profile is not None and (missing := missing_packages(profile, plan.kernel_packages)):
        changes["without_packages"] = ",".join(missing)
        if loops_without(profile, missing):  # as many operators as the loop has iterations
            changes["at"] = plan.tape_shape
    if plan.padding_fraction and plan.attention == "flash_attention_2":
        changes |= {"padding": plan.padding_fraction, "at": plan.tape_shape}
    return replace(key, **changes)


def _compiled_code(plan: Plan) -> TapeCompile:
    """The compiled part of the model, and whether DDP or FSDP2 divides its graphs."""
    in_ddp = plan.backend == "ddp" and plan.world_size > 1
    if plan.compile == "layer" and plan.uses_accelerate:
        return "regions-ddp" if in_ddp else "regions"
    if in_ddp:
        return "layer-ddp" if plan.compile == "layer" else "model-ddp"
    return "model-units" if plan.compile == "model" and takes_root_apart(plan) else plan.compile


def _with_loss(key: TapeKey, plan: Plan, profile: Profile | None) -> TapeKey:
    """The key with the task and its loss."""
    if plan.loss_code == "full":
        return replace(key, task=plan.task, reference=plan.reference) if plan.task != "sft" else key
    rounds = plan.unscored_labels > 0  # a rounded number of tokens
    generation, accumulation = plan.generation, plan.gradient_accumulation_steps
    if generation is not None:
        key = replace(
            key,
            completion_length=generation.completion_length,
            generated=generation.micro_batches(accumulation),
            generates=generation.generator == "transformers",
            scores_policy=generation.scores_policy(accumulation),
        )
    return replace(
        key,
        loss=plan.loss_code,
        ignored_labels=plan.unscored_labels,
        task=plan.task,
        reference=plan.reference,
        gathered_head=_gathered_head(plan, profile),
        router_loss=plan.adds_router_loss and profile is not None and profile.experts is not None,
        at=plan.tape_shape if rounds else key.at,
    )


def _gathered_head(plan: Plan, profile: Profile | None) -> GatheredHead:
    """Who gathers the head's weight for TRL's loss: see `TapeKey`. The loss gathers it in the dtype in which it is stored."""
    if profile is None:
        return ""
    index = head_gathered_by_loss(profile, plan)
    if index is None:
        return "generation" if head_gathered_by_generation(profile, plan) else ""
    return "bfloat16" if stored_bytes(plan, profile.root.parameters[index]) == 2 else "float32"


def _shows_in_the_graph(profile: Profile, plan: Plan) -> bool:
    """Whether autograd's graph of a model under FSDP1 depends on `use_orig_params`: an adapter reads the dtype of a weight before it is
    gathered, or parameters are padded to 16 bytes.
    """
    padded = (p.elements * plan.compute_bytes % 16 for p, _ in profile.counted_parameters())
    return bool(profile.adapter_parameters) or any(padded)


def _freezes_weights(profile: Profile) -> bool:
    """Whether weights of linear layers may be frozen. Weights that a model's own code freezes (tables of positions, biases of routers)
    are not in linear layers, so only adapters and --freeze matter.
    """
    return CONFIG_KEY in profile.config and profile.is_partly_frozen


def needs_window(profile: Profile, key: TapeKey, plan: Plan) -> bool:
    """Whether the plan's sequences fill a sliding window and the tape depends on that. It does not if the batch has its own mask."""
    return not key.masks and profile.fills_window(plan.seq_len)


def gpu_tape_key_of(profile: Profile, key: TapeKey, plan: Plan, gpu: Gpu) -> TapeKey:
    """The key of the tape that `gpu` runs instead of `key`'s, which is a CPU's. It depends on the GPU's kernels and on whether the
    plan's sequences fill a sliding window.
    """
    filled = needs_window(profile, key, plan)
    return gpu_tape_key(key, gpu.compute_capability, window_filled=filled, recorded=profile.tapes)


def searched_gpu_tape_key(profile: Profile, plan: Plan, gpu: Gpu) -> TapeKey:
    """The key of the tape with the kernels of `gpu`, whether it has been recorded or not."""
    cpu_key = with_available_attention(profile, tape_key_of(plan, profile))
    filled = needs_window(profile, cpu_key, plan)
    on_gpus = gpu_tape_keys(cpu_key, window_filled=filled, mixes_head_widths=mixes_head_widths(profile))
    return gpu_tape_key(cpu_key, gpu.compute_capability, window_filled=filled, recorded=[key.name for key in on_gpus])
