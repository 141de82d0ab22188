"""The waist: a request and a profile become a report. Everything below computes, everything above asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, UsageError
from fsdp_advisor.hardware import Gpu, attached_gpu, find_gpu, find_interconnect
from fsdp_advisor.hardware.links import ETHERNET_100G, Link
from fsdp_advisor.memory.device import device_overhead, verdict
from fsdp_advisor.memory.host import host_memory
from fsdp_advisor.memory.job import job_peaks
from fsdp_advisor.memory.ledger import ACCOUNTS, Ledger
from fsdp_advisor.memory.loading import one_copy_bytes
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
from fsdp_advisor.speed import Interval, StepTime, step_time, timeline, why_unknown
from fsdp_advisor.units import format_gib

DEFAULT_GPU = "H100-80GB"
DEFAULT_SEQ_LEN = 2048
MASK_WORTH_A_WORD = 0.02
TIME_UNKNOWN = "tokens_per_second_per_gpu, step_seconds: "
UNKNOWN_FIGURES = (
    "peak_allocated_bytes: what cuBLAS and attention kernels take beside tensors",
    "peak_reserved_bytes: the caching allocator's segments and fragmentation",
    "peak_device_bytes: CUDA context and NCCL buffers",
)


def estimate(request: EstimateRequest | None = None, /, *, explain: bool = False, **options: Any) -> Report:
    """The report of one job under one strategy or all of them.

    Takes an `EstimateRequest`, or its fields as keywords. `explain` adds what only an explanation needs: the peak with a
    fused loss. Raises AdvisorError with a hint.
    """
    request = request or make_request(options)
    return estimate_resolved(request, resolve(request.model), explain=explain)


AnyRequest = TypeVar("AnyRequest", bound=EstimateRequest)


@overload
def make_request(options: dict[str, Any]) -> EstimateRequest: ...
@overload
def make_request(options: dict[str, Any], kind: type[AnyRequest]) -> AnyRequest: ...
def make_request(options: dict[str, Any], kind: type[EstimateRequest] = EstimateRequest) -> EstimateRequest:
    """A request from keywords; pydantic's first complaint becomes a UsageError."""
    try:
        return kind(**options)
    except ValidationError as error:
        raise complaint(error.errors()[0], kind) from None


def complaint(error: Mapping[str, Any], kind: type[EstimateRequest] = EstimateRequest) -> UsageError:
    """One of pydantic's complaints, as an error with a hint."""
    name = ".".join(str(part) for part in error["loc"]) or "request"
    message = error["msg"].removeprefix("Value error, ")
    if name == "request":
        return UsageError(message, hint="each node has the same number of GPUs")
    return UsageError(f"{name}: {message}, not {error['input']!r}", hint=_hint(name, kind))


def _hint(name: str, kind: type[EstimateRequest]) -> str:
    field = kind.model_fields.get(name)
    if field is None:
        import difflib

        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        return f"did you mean {near[0]}?" if near else "see fsdp-advisor estimate --help"
    return field.description or "see fsdp-advisor estimate --help"


def estimate_resolved(request: EstimateRequest, model: Resolved, *, explain: bool = False) -> Report:
    """As `estimate`, for a model that is at hand."""
    gpu, notes = gpu_of(request)
    limit = model.profile.max_seq_len if model.profile else None
    seq_len = request.seq_len or (min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN)
    if limit and seq_len > limit:
        notes.append(f"seq_len {seq_len} is past the model's maximum of {limit} tokens")
    rows = plans(request, seq_len=seq_len)
    return Report(
        request=request,
        seq_len=seq_len,
        model_name=model.name,
        model_source=model.source,
        parameters=model.parameters,
        trainable_parameters=model.trainable_parameters,
        gpu_name=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        estimates=tuple(estimate_plan(model, plan, gpu, explain=explain) for plan in rows),
        task=model.profile.task if model.profile else None,
        layer_classes=model.profile.layer_classes if model.profile else (),
        largest_parameter_elements=model.profile.largest_parameter_elements if model.profile else None,
        notes=(*model.notes, *notes),
    )


def estimate_plan(model: Resolved, plan: Plan, gpu: Gpu, *, explain: bool = False) -> StrategyEstimate:
    """One row of a report."""
    if model.profile is None:
        return _count_estimate(model.parameters, plan, gpu)
    return _estimate(model, model.profile, plan, gpu, explain)


def tensor_bytes(model: Resolved, plan: Plan) -> int:
    """The tensor peak alone: the least that a plan needs, on any GPU. Raises AdvisorError where it has no tape."""
    assert model.profile is not None
    return replayed(model.profile, _taped(model, model.profile, plan)[1], plan).peak


def step_seconds(model: Resolved, plan: Plan, gpu: Gpu) -> float | None:
    """The time of a plan's step alone; None where it is not known."""
    if model.profile is None:
        return None
    variant, tape = _taped(model, model.profile, plan)
    step = step_of(model.profile, variant, tape, plan, gpu)
    return None if step is None else step.seconds


def gpu_of(request: EstimateRequest) -> tuple[Gpu, list[str]]:
    """The request's GPU, with the network that the request says is between nodes; and notes on what it did not say."""
    gpu, notes = choose_gpu(request.gpu)
    if request.interconnect is not None:
        gpu = replace(gpu, inter_node=find_interconnect(request.interconnect, gpu, request.gpus // request.nnodes))
    return gpu, notes


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
    if (why := why_unknown(plan, gpu)) is not None:
        unknown.append(TIME_UNKNOWN + why)
    copy = one_copy_bytes(profile, plan)
    loading = {"one_copy": copy, "every_rank": copy * plan.ranks_per_node}
    overhead = device_overhead(gpu, plan)
    try:
        variant, tape = _taped(model, profile, plan)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and model.source != "catalog":
            raise  # nothing can be said; of a catalogued model the other strategies can
        total = sum(h.rounded for h in (states.parameters, states.gradients, states.optimizer, states.communication))
        job = job_peaks(profile, plan, gpu, states=states, host=host, overhead=overhead, phase_peaks=None)
        return StrategyEstimate(
            plan=plan,
            fits=False if total > gpu.memory_bytes or job.fails else None,
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
            overhead=overhead,
            job=job,
            warnings=warnings,
            not_modelled=(
                f"the peak: {error}",
                *unknown,
                *([] if why else [TIME_UNKNOWN + "without a tape there is none"]),
            ),
        )
    if variant.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention: {variant.attention} is taken",)
    ledger = replayed(profile, tape, plan)
    job = job_peaks(profile, plan, gpu, states=states, host=host, overhead=overhead, phase_peaks=ledger.phase_peaks)
    step = step_of(profile, variant, tape, plan, gpu)
    unmasked = _without_mask(profile, variant, plan)
    if unmasked is not None and ledger.peak - unmasked > MASK_WORTH_A_WORD * ledger.peak:
        warnings += (
            f"{format_gib(ledger.peak - unmasked)} of the peak are attention masks and repeated key and value heads, which "
            f"transformers makes for sdpa on fake or traced tensors; a GPU's flash kernel needs none: {format_gib(unmasked)} there",
        )
    return StrategyEstimate(
        plan=plan,
        fits=verdict(overhead, gpu, tensor_bytes=ledger.peak).fits is not False and job.fails is None,
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
        step=step,
        overhead=overhead,
        job=job,
        warnings=warnings + (step.warnings if step else ()),
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


def step_of(profile: Profile, variant: Variant, tape: Tape, plan: Plan, gpu: Gpu) -> StepTime | None:
    """The time of a plan's step on a GPU, where sdpa runs a flash kernel; between nodes its `inter_node` link."""
    between: Link = gpu.inter_node or ETHERNET_100G
    return step_time(profile, _flash(profile, variant) or tape, plan, gpu, between)


def streams_of(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[Interval, ...]:
    """What computes and what is sent through the plan's last micro-batch and step; empty where the time is not known."""
    if model.profile is None:
        return ()
    variant, tape = _taped(model, model.profile, plan)
    return timeline(model.profile, _flash(model.profile, variant) or tape, plan, gpu, gpu.inter_node or ETHERNET_100G)


def _flash(profile: Profile, variant: Variant) -> Tape | None:
    """The tape of what sdpa runs on a GPU, where there is one: attention that takes no mask."""
    flash = Variant(variant.engine, variant.precision, "flash_attention_2", variant.checkpointing, False)
    return profile.tapes[flash.key] if variant.attention == "sdpa" and flash.key in profile.tapes else None


def _without_mask(profile: Profile, variant: Variant, plan: Plan) -> int | None:
    """The peak with attention that takes no mask, where that is on tape: what sdpa's flash kernel comes to on a GPU."""
    flash = _flash(profile, variant)
    return None if flash is None else replayed(profile, flash, plan).peak


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
            TIME_UNKNOWN + "a bare parameter count has no operators to time",
        ),
    )
