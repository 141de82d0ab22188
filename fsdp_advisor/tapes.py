"""Which recordings a plan replays: of PyTorch's step under fake tensors on a CPU, and of what a GPU runs in its place."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, NotRecordable
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.libraries import real_attention, to_record
from fsdp_advisor.model.profile import EAGER_ON_GPU, FSDP1_UNDER_AUTOCAST, Profile, Tape, Variant
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.units import format_gib

WORTH_A_WORD = 0.02
"""Of the peak: how far a GPU's may be from it in silence."""


def variant_of(plan: Plan) -> Variant:
    """Which recording a plan replays."""
    engine: str = plan.backend if plan.backend in ("fsdp1", "fsdp2") else "plain"
    if plan.backend == "fsdp1" and plan.facts.autocasts_fsdp1 and plan.mixed:
        engine = FSDP1_UNDER_AUTOCAST
    precision = "bf16-mixed" if plan.precision == "fp16-mixed" else plan.precision
    if plan.backend == "deepspeed" and plan.mixed:
        precision = "bf16"
    single = plan.micro_batch_size == 1 and plan.attention != "flash_attention_2"
    return _variant(engine, precision, plan.attention, plan.activation_checkpointing, single)


_variant = lru_cache(maxsize=1024)(Variant)  # one object of each, which knows its key


def taped(model: Resolved, profile: Profile, plan: Plan) -> tuple[Variant, Tape]:
    """The plan's tape. Where a recording under autocast is neither there nor to be made, the one without, which leaves casts out."""
    variant = variant_of(plan)
    try:
        return _with_attention(model, profile, plan, variant)
    except (MissingExtra, NotRecordable) as error:
        if not variant.prepared or (model.recording_allowed and not isinstance(error, MissingExtra)):
            raise
        return _with_attention(model, profile, plan, replace(variant, engine=plan.backend))


def _with_attention(model: Resolved, profile: Profile, plan: Plan, variant: Variant) -> tuple[Variant, Tape]:
    """The variant's tape; eager attention's where the model has no sdpa, as transformers itself does."""
    if model.from_catalog and variant.key in profile.tapes:
        return variant, model.tape(variant)
    eager = replace(variant, attention="eager")
    if plan.attention == "sdpa" and model.from_catalog and eager.key in profile.tapes:
        return eager, model.tape(eager)
    try:
        tape = model.tape(variant)
    except NoSuchAttention:
        if plan.attention != "sdpa":
            raise
        variant, tape = eager, model.tape(eager)
    if not model.from_catalog:
        for real in to_record(variant, windowed=profile.fills_window(plan.seq_len)):
            _record_on_gpu(model, real)
    return variant, tape


@lru_cache(maxsize=64)  # what cannot be recorded is not tried again
def _record_on_gpu(model: Resolved, variant: Variant) -> None:
    """Have the tape of what a GPU runs at hand, which may take more or less than fake tensors."""
    with contextlib.suppress(AdvisorError):
        model.tape(variant)


def tape_on(model: Resolved, plan: Plan, gpu: Gpu) -> Tape:
    """What the plan's steps come to on a GPU: for sdpa the recording of its kernels, made now if it is not there."""
    assert model.profile is not None
    variant, tape = taped(model, model.profile, plan)
    try:
        return model.tape(real_variant(model.profile, variant, plan, gpu))
    except NotRecordable:
        return tape


def real_variant(profile: Profile, variant: Variant, plan: Plan, gpu: Gpu | None = None) -> Variant:
    """Which recording a plan comes to on a GPU; on one of no name, where sdpa has its kernels for half precision."""
    capability = None if gpu is None else gpu.compute_capability
    windowed = profile.fills_window(plan.seq_len)
    return real_attention(variant, capability, windowed=windowed, recorded=profile.tapes)


def real_tape(profile: Profile, taped: tuple[Variant, Tape], plan: Plan, gpu: Gpu | None = None) -> Tape:
    """The tape of `real_variant`; where there is none, the one that the plan itself replays."""
    variant, tape = taped
    return profile.tapes.get(real_variant(profile, variant, plan, gpu).key) or tape


def difference_on_gpu(real: Variant, tensor_bytes: int, on_gpu_bytes: int) -> tuple[str, ...]:
    """What the tensors on a GPU are other than under fake ones, where that is worth a word."""
    more = on_gpu_bytes - tensor_bytes
    if abs(more) <= WORTH_A_WORD * tensor_bytes:
        return ()
    there = f"{format_gib(on_gpu_bytes)} there"
    if more > 0 and real.precision == "fp32":
        return (
            f"a GPU takes {format_gib(more)} more than the peak of fake tensors: in fp32 PyTorch has no fused kernel for sdpa with "
            f"grouped key and value heads, so it makes whole score matrices: {there}; bf16-mixed makes none",
        )
    if more > 0:
        return (
            f"a GPU takes {format_gib(more)} more than the peak of fake tensors: under autocast it runs norms, softmax and powers "
            f"in fp32, which a CPU does not: {there}",
        )
    if real.attention == EAGER_ON_GPU:
        return (
            f"{format_gib(-more)} of the peak are what dropout keeps on a CPU; a GPU keeps a byte per element: {there}",
        )
    kernel = "flash kernel needs none" if real.attention == "flash_attention_2" else "kernels need fewer"
    return (
        f"{format_gib(-more)} of the peak are masks, scores or repeated heads that sdpa makes on fake or traced tensors; "
        f"a GPU's {kernel}: {there}",
    )
