"""Selects a plan's tapes: of the step under fake tensors on a CPU, and of the step with a GPU's kernels."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from fsdp_advisor.engines.wrapping import head_gathered_by_loss, takes_root_apart, tape_wrap
from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, NotPolynomial, NotRecordable, UsageError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.adaptation import CONFIG_KEY, may_adapt
from fsdp_advisor.job.choices import DEFAULT_SEQ_LEN, Backend, Precision
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.tiled_mlp import tiled_mlp_code
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.model.experts import experts_code, has_long_expert_loop
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key, gpu_tape_keys
from fsdp_advisor.model.kernels import has_long_loop, has_loop
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import catalogued_tapes
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import (
    GatheredHead,
    TapeAttention,
    TapeCheckpointing,
    TapeCompile,
    TapeEngine,
    TapeKey,
    TapePrecision,
)
from fsdp_advisor.policies.dtypes import stored_bytes


class SelectedTape(NamedTuple):
    """A tape, and the key for which it was recorded."""

    key: TapeKey
    tape: Tape


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
    kept = catalogued_tapes(request.model)
    if kept is None:
        return False
    is_thorough = isinstance(request, RecommendRequest) and request.thorough
    if is_thorough or may_adapt(request) or request.eval_strategy != "no":
        return True
    # the model decides whether they matter
    if request.wrap != "layer" or request.experts_implementation != "grouped_mm" or not request.use_orig_params:
        return True
    try:
        job = request.as_estimate if isinstance(request, RecommendRequest) else request
        asked = plans(job, seq_len=job.seq_len or DEFAULT_SEQ_LEN)
    except UsageError:  # the answer will be this error
        return False
    return not all(tape_key_of(plan).is_in_catalog(kept) for plan in asked)


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
    return _key(engine, precision, plan.attention, checkpointing, one, wrap)


def _accelerate_checkpoints(plan: Plan, profile: Profile | None) -> bool:
    """Whether accelerate's FSDP2 checkpoints the layers of a model whose embedding is frozen. If the embedding is trained, the step equals
    that of `gradient_checkpointing_enable`, which makes the embedding's output require a gradient. The Trainer and TRL have both; their
    exported files use the latter for such a model (`export.checkpointing`). axolotl makes the output require a gradient by itself.

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_apply_ac`; transformers 5.23, modeling_utils.py, `gradient_checkpointing_enable`.
    """
    if plan.framework != "accelerate" or plan.backend != "fsdp2" or plan.checkpointing != "full" or profile is None:
        return False
    if plan.activation_offload or plan.compile != "none":
        return False
    return any(p.role == "embedding" and not p.trainable for p in profile.root.parameters)


def _with_options(key: TapeKey, plan: Plan, profile: Profile | None) -> TapeKey:
    """The key with the options of the step that change its tensors, other than the loss."""
    zero3_linear = plan.backend == "deepspeed" and plan.strategy == "zero3"
    changes: dict[str, Any] = {
        "activation_offload": plan.offload_code,
        "evaluates": plan.evaluates,
        "fp8": plan.fp8,
        "liger_kernels": plan.use_liger_kernel,
        "images": plan.images,
        "batch": plan.batch_layout,
        "flat_parameters": profile is not None and plan.steps_flat_parameters and _shows_in_the_graph(profile, plan),
        "saves_linear_inputs": zero3_linear and profile is not None and _freezes_weights(profile),
    }
    if plan.compile != "none":
        changes |= {"compile": _compiled_code(plan), "memory_budget": plan.memory_budget, "at": plan.tape_shape}
    if plan.tiled_mlp != "none":  # shards differ by one token
        changes |= {"tiled_mlp": f"{tiled_mlp_code(plan)}:{plan.tiled_mlp}", "at": plan.tape_shape}
    if profile is not None and (code := experts_code(profile, plan.experts_implementation)) is not None:
        changes["experts"] = code
        if code == "eager":  # sizes depend on the tokens of each expert
            changes |= {"imbalance": plan.expert_imbalance, "at": plan.tape_shape}
    if plan.padding_fraction and plan.attention == "flash_attention_2":
        changes |= {"padding": plan.padding_fraction, "at": plan.tape_shape}
    changes = {name: value for name, value in changes.items() if value != getattr(key, name)}
    return replace(key, **changes) if changes else key  # a key caches its name


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
    """The dtype in which TRL's loss gathers the head's weight, which is the one in which it is stored; empty if FSDP2 gathers it."""
    index = None if profile is None else head_gathered_by_loss(profile, plan)
    if profile is None or index is None:
        return ""
    return "bfloat16" if stored_bytes(plan, profile.root.parameters[index]) == 2 else "float32"


@lru_cache(maxsize=1024)  # one object per key, because each caches its name
def _key(
    engine: TapeEngine,
    precision: TapePrecision,
    attention: TapeAttention,
    checkpointing: TapeCheckpointing,
    batch_is_one: bool,
    wrap: str,
) -> TapeKey:
    if attention == "flash_attention_2":  # its kernel runs the same code for every B
        return TapeKey(engine, precision, attention, checkpointing, device="gpu", wrap=wrap)
    return TapeKey(engine, precision, attention, checkpointing, batch_is_one, wrap=wrap)


def _shows_in_the_graph(profile: Profile, plan: Plan) -> bool:
    """Whether autograd's graph of a model under FSDP1 depends on `use_orig_params`: an adapter reads the dtype of a weight before it is
    gathered, or parameters are padded to 16 bytes.
    """
    padded = (p.elements * plan.compute_bytes % 16 for unit, _ in profile.counted_units() for p in unit.parameters)
    return bool(profile.adapter_parameters) or any(padded)


def _freezes_weights(profile: Profile) -> bool:
    """Whether weights of linear layers may be frozen. Weights that a model's own code freezes (tables of positions, biases of routers)
    are not in linear layers, so only adapters and --freeze matter.
    """
    return CONFIG_KEY in profile.config and profile.is_partly_frozen


def select_tape(model: Resolved, plan: Plan, gpu: Gpu | None = None) -> SelectedTape:
    """The plan's tape on a CPU and its key.

    A missing tape is recorded now if that is allowed, and so are the tapes with the kernels of `gpu`, or of every GPU if it is None. The
    profile keeps them.

    If the tape cannot be recorded, falls back to a similar one: for FSDP1 with autocast to the tape without autocast, which counts no
    casts; for reentrant checkpointing and for accelerate's to the tape of the model's non-reentrant checkpointing; for
    ZeRO-3 to the tape of linear layers that save no input.
    """
    profile = _profile_of(model)
    key = tape_key_of(plan, profile)
    similar = replace(
        key,
        engine="fsdp1" if key.autocasts_fsdp1 else key.engine,
        saves_linear_inputs=False,
        checkpointing="full" if key.checkpointing in ("reentrant", "full-accelerate") else key.checkpointing,
    )
    try:
        return _for_any_batch(model, profile, plan, key, gpu)
    except (MissingExtra, NotRecordable) as error:
        if similar == key or (model.recording_allowed and not isinstance(error, MissingExtra)):
            raise
        return _for_any_batch(model, profile, plan, similar, gpu)


def tape_of_row(model: Resolved, plan: Plan, gpu: Gpu | None = None) -> SelectedTape:
    """The tape of a row of an estimate, and its key.

    This is the tape of `select_tape`, or, if the CPU's tape is valid for a single micro-batch and length, a GPU tape that is valid for all.
    Linear attention runs in chunks. On a CPU the number of its operators depends on the sequence length; on a GPU the number of its
    kernels does not. A loop over chunks, over the tokens of Mamba-1's scan or over many experts can take minutes to record, so a model that
    has one needs no tape of a CPU. Raises the error about the GPU's tape if the loop is long.
    """
    profile = _profile_of(model)
    key = tape_key_of(plan, profile)
    if (
        has_loop(profile)
        or takes_long_on_cpu(profile, plan)
        or (key.at is None and _is_refused(profile, key, NotPolynomial))
    ):
        if has_loop(profile) and _gpu_sizes_are_not_polynomials(profile, key):
            key = replace(key, at=plan.tape_shape)
        try:
            return _gpu_step_tape(model, profile, key, plan)
        except NotPolynomial:
            if has_loop(profile) and key.at is None:
                return _gpu_step_tape(model, profile, replace(key, at=plan.tape_shape), plan)
        except AdvisorError:
            if takes_long_on_cpu(profile, plan):
                raise
    return select_tape(model, plan, gpu)


def _gpu_sizes_are_not_polynomials(profile: Profile, key: TapeKey) -> bool:
    """Whether a recording of a step on a GPU has shown that its sizes are not polynomials. Then they are not on any code path with the
    key's images, over which a vision tower may loop.
    """
    kind = NotPolynomial.__name__
    refused = [TapeKey.from_name(name) for name, refusal in profile.refusals.items() if refusal["kind"] == kind]
    return any(other.device == "gpu" and other.images == key.images for other in refused)


def takes_long_on_cpu(profile: Profile, plan: Plan) -> bool:
    """Whether the step on a CPU has a loop in Python that is too long to record it."""
    return has_long_loop(profile, plan.tape_shape[1]) or has_long_expert_loop(profile, plan.experts_implementation)


def _gpu_step_tape(model: Resolved, profile: Profile, key: TapeKey, plan: Plan) -> SelectedTape:
    """The GPU tape that stands for the CPU's, and its key; with eager attention for a model without sdpa. Raises AdvisorError."""
    wanted = replace(key, attention="eager") if _lacks_sdpa(profile) else key
    first, *others = gpu_tape_keys(wanted, window_filled=_needs_window(profile, wanted, plan))
    try:
        tape = model.tape(first)
    except NoSuchAttention:
        first, *others = gpu_tape_keys(replace(key, attention="eager"), window_filled=first.window_filled)
        tape = model.tape(first)
    for other in others:  # kernels of other GPUs; `gpu_tape` finds only recorded tapes
        model.tape(other)
    return SelectedTape(first, tape)


def _profile_of(model: Resolved) -> Profile:
    """The model's profile. The model is not a bare parameter count, which has none."""
    assert model.profile is not None
    return model.profile


def _is_refused(profile: Profile, key: TapeKey, kind: type[AdvisorError]) -> bool:
    refusal = profile.refusals.get(key.name)
    return refusal is not None and refusal["kind"] == kind.__name__


def _for_any_batch(model: Resolved, profile: Profile, plan: Plan, key: TapeKey, gpu: Gpu | None) -> SelectedTape:
    """The key's tape, which is valid for any micro-batch and length, or else a tape for the plan's own micro-batch and length.

    Recording a tape that is valid for any batch takes three steps or more; recording one for the plan's own batch takes one step. So the
    first request on a code path records its own batch, and a later request with another batch records a tape for any batch. If the sizes
    are not polynomials, no tape is valid for any batch.
    """
    own = replace(key, at=plan.tape_shape)
    if _is_first_question(model, profile, key, own):
        return _with_attention(model, profile, plan, own, gpu)
    with contextlib.suppress(NotPolynomial):
        return _with_attention(model, profile, plan, key, gpu)
    return _with_attention(model, profile, plan, own, gpu)


def _is_first_question(model: Resolved, profile: Profile, key: TapeKey, own: TapeKey) -> bool:
    """Whether to use a tape for the plan's own micro-batch and length: it is the first of its code path, or no tape is valid for any batch.

    A model whose sizes are not polynomials on one code path (because of linear attention, for example) has such sizes on all.
    """
    not_polynomial = any(refusal["kind"] == NotPolynomial.__name__ for refusal in profile.refusals.values())
    return not_polynomial or (key.name not in profile.tapes and (own.name in profile.tapes or model.is_new(key)))


def _with_attention(model: Resolved, profile: Profile, plan: Plan, key: TapeKey, gpu: Gpu | None) -> SelectedTape:
    """The key's tape. Falls back to eager attention if the model does not support sdpa, as transformers does."""
    if model.from_catalog and key.name in profile.tapes:
        return SelectedTape(key, model.tape(key))
    eager = replace(key, attention="eager")
    if key.attention == "sdpa" and eager.name in profile.tapes and _lacks_sdpa(profile):
        return SelectedTape(eager, model.tape(eager))
    try:
        tape = model.tape(key)
    except NoSuchAttention:
        if plan.attention != "sdpa":
            raise
        key, tape = eager, model.tape(eager)
    for on_gpu in _keys_to_record(key, gpu, window_filled=_needs_window(profile, key, plan)):
        _record_on_gpu(model, on_gpu)
    return SelectedTape(key, tape)


def _keys_to_record(key: TapeKey, gpu: Gpu | None, *, window_filled: bool) -> tuple[TapeKey, ...]:
    """The keys of the tapes to record with GPU kernels: only those of `gpu`, because each recording takes long, or of every GPU if it
    is None.
    """
    keys = gpu_tape_keys(key, window_filled=window_filled)
    if gpu is None:
        return keys
    recorded = [each.name for each in keys]
    own = gpu_tape_key(key, gpu.compute_capability, window_filled=window_filled, recorded=recorded)
    return (own,) if own in keys else keys


def _lacks_sdpa(profile: Profile) -> bool:
    """Whether a recording has shown that the model's code has no sdpa."""
    return any(
        refusal["kind"] == NoSuchAttention.__name__ and TapeKey.from_name(name).attention == "sdpa"
        for name, refusal in profile.refusals.items()
    )


@lru_cache(maxsize=64)  # does not repeat a failed recording
def _record_on_gpu(model: Resolved, key: TapeKey) -> None:
    """Record a GPU tape if possible. Raises NotPolynomial, and any error about compiled code."""
    try:
        model.tape(key)
    except NotPolynomial:
        raise
    except AdvisorError:
        if key.compiles:
            raise


def _needs_window(profile: Profile, key: TapeKey, plan: Plan) -> bool:
    """Whether the plan's sequences fill a sliding window and the tape depends on that. It does not if the batch has its own mask."""
    return not key.masks and profile.fills_window(plan.seq_len)


def gpu_tape_key_of(profile: Profile, key: TapeKey, plan: Plan, gpu: Gpu) -> TapeKey:
    """The key of the tape that `gpu` runs instead of `key`'s, which is a CPU's. It depends on the GPU's kernels and on whether the
    plan's sequences fill a sliding window.
    """
    filled = _needs_window(profile, key, plan)
    return gpu_tape_key(key, gpu.compute_capability, window_filled=filled, recorded=profile.tapes)


def gpu_tape(profile: Profile, selected: SelectedTape, plan: Plan, gpu: Gpu) -> Tape:
    """The GPU tape of a plan; the selected tape if there is none."""
    return profile.tapes.get(gpu_tape_key_of(profile, selected.key, plan, gpu).name) or selected.tape


def tape_for_search(model: Resolved, plan: Plan, gpu: Gpu) -> Tape:
    """The tape of a plan's step with the GPU's kernels, for a search. Raises AdvisorError if there is none.

    If the catalog lacks it, only this tape is recorded, because a search needs no tape of the CPU.
    """
    profile = _profile_of(model)
    is_catalogued = model.from_catalog and tape_key_of(plan, profile).name in profile.tapes
    if model.recording_allowed and not is_catalogued:
        with contextlib.suppress(AdvisorError):  # then the CPU's tape is used, or its error raised
            return _recorded_for(model, profile, plan, gpu)
    return gpu_tape(profile, tape_of_row(model, plan, gpu), plan, gpu)


def records_each_batch(model: Resolved, plan: Plan, gpu: Gpu) -> bool:
    """Whether a search has to record the plan's own micro-batch, because no recording is valid for every one."""
    profile = _profile_of(model)
    key = _searched_key(profile, plan, gpu)
    own = replace(key, at=plan.tape_shape)
    return own.name not in profile.tapes and _gpu_sizes_are_not_polynomials(profile, key)


def _searched_key(profile: Profile, plan: Plan, gpu: Gpu) -> TapeKey:
    """The key of the tape with the kernels of `gpu`, whatever has been recorded."""
    cpu_key = tape_key_of(plan, profile)
    filled = _needs_window(profile, cpu_key, plan)
    names = [key.name for key in gpu_tape_keys(cpu_key, window_filled=filled)]
    return gpu_tape_key(cpu_key, gpu.compute_capability, window_filled=filled, recorded=names)


def _recorded_for(model: Resolved, profile: Profile, plan: Plan, gpu: Gpu) -> Tape:
    """The tape with the GPU's kernels. It is recorded if it is missing; the CPU's tape is not. For a micro-batch above 1 the recording is
    valid for every batch, because a search asks for other batches next.
    """
    key = _searched_key(profile, plan, gpu)
    if key.device == "cpu":
        raise NotRecordable(f"the kernels of {gpu.name} are not modelled", hint="the step on a CPU is used instead")
    own = replace(key, at=plan.tape_shape)
    asks_for_others = not key.batch_is_one and own.name not in profile.tapes
    if _gpu_sizes_are_not_polynomials(profile, key) or (
        not asks_for_others and _is_first_question(model, profile, key, own)
    ):
        return model.tape(own)
    with contextlib.suppress(NotPolynomial):
        return model.tape(key)
    return model.tape(own)


def recorded_gpu_tape(model: Resolved, plan: Plan, gpu: Gpu) -> Tape:
    """The `gpu_tape` of a plan. It is recorded first if it is missing and recording is possible."""
    key, tape = tape_of_row(model, plan, gpu)
    try:
        return model.tape(gpu_tape_key_of(_profile_of(model), key, plan, gpu))
    except NotRecordable:
        return tape
