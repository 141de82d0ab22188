"""The waist: a request and a profile become a report. Everything below computes, everything above asks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, UsageError
from fsdp_advisor.hardware import Gpu, attached_gpu, find_gpu
from fsdp_advisor.memory.host import host_memory
from fsdp_advisor.memory.ledger import ACCOUNTS, Ledger
from fsdp_advisor.memory.replay import replay
from fsdp_advisor.memory.schedules import not_modelled, schedule_for
from fsdp_advisor.memory.schedules.fsdp2 import padding_warnings
from fsdp_advisor.memory.score import compile_tape
from fsdp_advisor.memory.textbook import textbook_states
from fsdp_advisor.memory.wrapping import marked
from fsdp_advisor.models.profile import Profile, Tape, Variant
from fsdp_advisor.plan import Plan, plans
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.request import EstimateRequest
from fsdp_advisor.resolve import Resolved, resolve
from fsdp_advisor.units import format_gib

DEFAULT_GPU = "H100-80GB"
DEFAULT_SEQ_LEN = 2048
MASK_WORTH_A_WORD = 0.02
UNKNOWN_FIGURES = (
    "peak_allocated_bytes: what cuBLAS and attention kernels take beside tensors",
    "peak_reserved_bytes: the caching allocator's segments and fragmentation",
    "peak_device_bytes: CUDA context and NCCL buffers",
    "tokens_per_second_per_gpu, step_seconds: time is not computed",
)


def estimate(request: EstimateRequest | None = None, /, *, explain: bool = False, **options: Any) -> Report:
    """The report of one job under one strategy or all of them.

    Takes an `EstimateRequest`, or its fields as keywords. `explain` adds what only an explanation needs: the peak with a
    fused loss. Raises AdvisorError with a hint.
    """
    request = request or make_request(options)
    return estimate_resolved(request, resolve(request.model), explain=explain)


def make_request(options: dict[str, Any]) -> EstimateRequest:
    """A request from keywords; pydantic's first complaint becomes a UsageError."""
    try:
        return EstimateRequest(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "request"
        message = first["msg"].removeprefix("Value error, ")
        if name == "request":
            raise UsageError(message, hint="each node has the same number of GPUs") from None
        raise UsageError(f"{name}: {message}, not {first['input']!r}", hint=_hint(name)) from None


def _hint(name: str) -> str:
    field = EstimateRequest.model_fields.get(name)
    if field is None:
        import difflib

        near = difflib.get_close_matches(name, EstimateRequest.model_fields, n=1)
        return f"did you mean {near[0]}?" if near else "see fsdp-advisor estimate --help"
    return field.description or "see fsdp-advisor estimate --help"


def estimate_resolved(request: EstimateRequest, model: Resolved, *, explain: bool = False) -> Report:
    """As `estimate`, for a model that is at hand."""
    gpu, notes = choose_gpu(request.gpu)
    limit = model.profile.max_seq_len if model.profile else None
    seq_len = request.seq_len or (min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN)
    if limit and seq_len > limit:
        notes.append(f"seq_len {seq_len} is past the model's maximum of {limit} tokens")
    rows = plans(request, seq_len=seq_len)
    if model.profile is None:
        estimates = tuple(_count_estimate(model.parameters, plan, gpu) for plan in rows)
    else:
        estimates = tuple(_estimate(model, model.profile, plan, gpu, explain) for plan in rows)
    return Report(
        request=request,
        seq_len=seq_len,
        model_name=model.name,
        model_source=model.source,
        parameters=model.parameters,
        trainable_parameters=model.trainable_parameters,
        gpu_name=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        estimates=estimates,
        notes=(*model.notes, *notes),
    )


def choose_gpu(name: str | None) -> tuple[Gpu, list[str]]:
    """The GPU asked for, else the attached one, else the default; and a note where it was not asked for."""
    if name is not None:
        return find_gpu(name), []
    if (gpu := attached_gpu()) is not None:
        return gpu, [f"GPU: {gpu.name}, the one attached"]
    return find_gpu(DEFAULT_GPU), [f"GPU: none attached, so {DEFAULT_GPU} is assumed; say --gpu for another"]


def variant_of(plan: Plan) -> Variant:
    """Which recording a plan replays."""
    engine = plan.backend if plan.backend in ("fsdp1", "fsdp2") else "plain"
    precision = "bf16-mixed" if plan.precision == "fp16-mixed" else plan.precision
    if plan.backend == "deepspeed" and plan.mixed:
        precision = "bf16"
    single = plan.micro_batch_size == 1 and plan.attention != "flash_attention_2"
    return Variant(engine, precision, plan.attention, plan.activation_checkpointing, single)


def _taped(model: Resolved, profile: Profile, plan: Plan) -> tuple[Variant, Tape]:
    """The plan's tape; eager attention's where the model has no sdpa, as transformers itself does."""
    variant = variant_of(plan)
    eager = replace(variant, attention="eager")
    if plan.attention != "sdpa":
        return variant, model.tape(variant)
    if model.source == "catalog" and variant.key not in profile.tapes and eager.key in profile.tapes:
        return eager, profile.tapes[eager.key]
    try:
        return variant, model.tape(variant)
    except NoSuchAttention:
        return eager, model.tape(eager)


def _estimate(model: Resolved, profile: Profile, plan: Plan, gpu: Gpu, explain: bool) -> StrategyEstimate:
    schedule = schedule_for(profile, plan)
    states = schedule.states
    kept = {
        "parameters": states.parameters.exact,
        "gradients": states.gradients.exact,
        "optimizer": states.optimizer.exact,
        "communication": states.communication.exact,
        "buffers": states.buffers.exact,
    }
    host = host_memory(profile, plan)
    warnings = tuple(padding_warnings(profile, plan)) if plan.backend == "fsdp2" else ()
    unknown = [*UNKNOWN_FIGURES, *not_modelled(profile, plan)]
    loading = {"one_copy": host.loading_one_copy, "every_rank": host.loading_every_rank}
    try:
        variant, tape = _taped(model, profile, plan)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and model.source != "catalog":
            raise  # nothing can be said; of a catalogued model the other strategies can
        total = sum(h.rounded for h in (states.parameters, states.gradients, states.optimizer, states.communication))
        return StrategyEstimate(
            plan=plan,
            fits=False if total > gpu.memory_bytes else None,
            fits_by="states",
            peak_tensor_bytes=None,
            peak_phase=None,
            peak_where=None,
            phase_peaks=None,
            states=kept,
            at_peak=None,
            headroom_bytes=None,
            host_bytes_per_node=host.steady,
            host_loading_bytes_per_node=loading,
            fused_loss_peak_bytes=None,
            warnings=warnings,
            not_modelled=(f"the peak: {error}", *unknown),
        )
    if variant.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention: {variant.attention} is taken",)
    ledger = replayed(profile, tape, plan)
    unmasked = _without_mask(profile, variant, plan)
    if unmasked is not None and ledger.peak - unmasked > MASK_WORTH_A_WORD * ledger.peak:
        warnings += (
            f"{format_gib(ledger.peak - unmasked)} of the peak are attention masks and repeated key and value heads, which "
            f"transformers makes for sdpa on fake or traced tensors; a GPU's flash kernel needs none: {format_gib(unmasked)} there",
        )
    return StrategyEstimate(
        plan=plan,
        fits=ledger.peak <= gpu.memory_bytes,
        fits_by="peak_tensor_bytes",
        peak_tensor_bytes=ledger.peak,
        peak_phase=ledger.peak_phase,
        peak_where=ledger.peak_where,
        phase_peaks=ledger.phase_peaks,
        states=kept,
        at_peak=dict(zip(ACCOUNTS, ledger.at_peak, strict=True)),
        headroom_bytes=gpu.memory_bytes - ledger.peak,
        host_bytes_per_node=host.steady,
        host_loading_bytes_per_node=loading,
        fused_loss_peak_bytes=replayed(profile, tape, plan, fused_loss=True).peak if explain else None,
        warnings=warnings,
        not_modelled=tuple(unknown),
        timeline=tuple(ledger.timeline),
    )


@lru_cache(maxsize=4096)
def replayed(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False) -> Ledger:
    """A plan's step; `fused_loss` as if nothing of the loss were ever whole (a fused or chunked loss)."""
    schedule = schedule_for(profile, plan)
    score = compile_tape(
        profile,
        marked(profile, tape, plan),
        plan.micro_batch_size,
        plan.seq_len,
        grad_marks=schedule.grad_marks,
        fused_loss=fused_loss,
    )
    return replay(profile, score, schedule, plan.gradient_accumulation_steps)


def _without_mask(profile: Profile, variant: Variant, plan: Plan) -> int | None:
    """The peak with attention that takes no mask, where that is on tape: what sdpa's flash kernel comes to on a GPU."""
    flash = Variant(variant.engine, variant.precision, "flash_attention_2", variant.checkpointing, False)
    if variant.attention != "sdpa" or flash.key not in profile.tapes:
        return None
    return replayed(profile, profile.tapes[flash.key], plan).peak


def _count_estimate(parameters: int, plan: Plan, gpu: Gpu) -> StrategyEstimate:
    states = textbook_states(parameters, plan)
    return StrategyEstimate(
        plan=plan,
        fits=False if states.total > gpu.memory_bytes else None,
        fits_by="states",
        peak_tensor_bytes=None,
        peak_phase=None,
        peak_where=None,
        phase_peaks=None,
        states={"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer},
        at_peak=None,
        headroom_bytes=None,
        host_bytes_per_node=states.host_per_node,
        host_loading_bytes_per_node=None,
        fused_loss_peak_bytes=None,
        not_modelled=(
            "peaks: a bare parameter count says nothing of activations, logits, gathered units and buckets",
            *UNKNOWN_FIGURES,
        ),
    )
