"""The waist: a request and a profile become a report. Everything below computes, everything above asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from fsdp_advisor.engines import not_modelled, states_of
from fsdp_advisor.engines.deepspeed.settings import hidden_size
from fsdp_advisor.engines.fsdp2.schedule import padding_warnings
from fsdp_advisor.engines.host import host_memory
from fsdp_advisor.engines.job_peaks import job_peaks, loading_of
from fsdp_advisor.engines.transfer import Loading, one_copy_bytes
from fsdp_advisor.errors import AdvisorError, MissingExtra
from fsdp_advisor.hardware import Gpu, attached_gpu, find_gpu, find_interconnect
from fsdp_advisor.hardware.links import ETHERNET_100G, Link
from fsdp_advisor.job.plan import Plan, plans
from fsdp_advisor.job.request import AnyRequest, EstimateRequest, plainly
from fsdp_advisor.memory.device import DeviceOverhead, Verdict, device_overhead, verdict
from fsdp_advisor.memory.ledger import ACCOUNTS, Point
from fsdp_advisor.memory.libraries import allocated, cublas_workspace_bytes
from fsdp_advisor.memory.step import replayed
from fsdp_advisor.memory.step import timeline as timeline_of
from fsdp_advisor.memory.textbook import textbook_states
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.tapes import difference_on_gpu, gpu_tape, gpu_tape_key_of, select_tape, tape_key_of
from fsdp_advisor.timing import Interval, StepTime, step_time, timeline, why_unknown

if TYPE_CHECKING:  # the allocator is imported where it is walked
    from fsdp_advisor.memory.allocator import AllocatorConf, Reserved

DEFAULT_GPU = "H100-80GB"
DEFAULT_SEQ_LEN = 2048
TIME_UNKNOWN = "tokens_per_second_per_gpu, step_seconds"
PEAKS_UNKNOWN = "the peak, peak_allocated_bytes, peak_reserved_bytes, peak_device_bytes"
NOT_WALKED = (
    "peak_reserved_bytes, peak_device_bytes: the caching allocator's fragmentation, which is computed with --reserved"
)
NO_AUTOCAST = "what autocast casts, under which accelerate runs FSDP1 as well: it is not recorded here, and needs torch"
NO_SCRATCH = "peak_allocated_bytes: what the attention kernel takes for itself"

Walk = Literal["never", "if open", "if it may fit", "always"]
"""Whether the caching allocator is walked through the job's steps: if the cheaper figures leave the verdict open, if they do not
rule the job out, or always."""
_WALKED_AFTER: dict[Walk, tuple[bool | None, ...]] = {
    "never": (),
    "if open": (None,),
    "if it may fit": (None, True),
    "always": (None, True, False),
}
"""The cheaper figures' word on whether it fits."""


def estimate(
    request: EstimateRequest | None = None, /, *, explain: bool = False, walk: Walk = "never", **options: Any
) -> Report:
    """The report of one job under one strategy or all of them.

    Takes an `EstimateRequest`, or its fields as keywords. `explain` adds what only an explanation needs: the peak with a
    fused loss. `walk` says of which rows the caching allocator is walked, which takes a part of a second; of all where
    reserved memory is asked for.
    Raises AdvisorError with a hint.
    """
    request = request or make_request(options)
    return estimate_resolved(request, resolve(request.model), explain=explain, walk=walk)


@overload
def make_request(given: Mapping[str, Any]) -> EstimateRequest: ...
@overload
def make_request(given: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest: ...
def make_request(given: Mapping[str, Any], kind: type[EstimateRequest] = EstimateRequest) -> EstimateRequest:
    """A request from keywords, which may be text. Raises UsageError with the first complaint about them."""
    plain = plainly(given, kind)
    if plain is not None:
        return plain
    from fsdp_advisor.job.parsing import read  # pydantic takes longer to import than most answers take

    return read(given, kind)


def estimate_resolved(
    request: EstimateRequest, model: Resolved, *, explain: bool = False, walk: Walk = "never"
) -> Report:
    """As `estimate`, for a model that is at hand."""
    gpu, notes = gpu_of(request)
    conf = _allocator_conf(request)
    if request.reserved:
        walk = "always"
    elif request.allocator_conf:
        walk = "if it may fit"
    seq_len, said = _seq_len(request, model.profile)
    notes += said
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
        estimates=tuple(
            estimate_plan(
                model, plan, gpu, explain=explain, walk=walk, conf=conf, host_memory_bytes=request.host_memory
            )
            for plan in rows
        ),
        task=model.profile.task if model.profile else None,
        layer_classes=model.profile.layer_classes if model.profile else (),
        largest_parameter_elements=model.profile.largest_parameter_elements if model.profile else None,
        hidden_size=hidden_size(model.profile) if model.profile else None,
        notes=(*model.notes, *notes),
    )


def estimate_plan(
    model: Resolved,
    plan: Plan,
    gpu: Gpu,
    *,
    explain: bool = False,
    walk: Walk = "never",
    conf: AllocatorConf | None = None,
    host_memory_bytes: int | None = None,
) -> StrategyEstimate:
    """One row of a report. Without `host_memory_bytes`, a node's, its host has room for everything."""
    if model.profile is None:
        return _count_estimate(model.parameters, plan, gpu)
    return _estimate(model, model.profile, plan, gpu, explain, walk, conf, host_memory_bytes)


def tensor_bytes(model: Resolved, plan: Plan) -> int:
    """The tensors of a run on a GPU: the least that a plan needs there. Raises AdvisorError where it has no tape."""
    assert model.profile is not None
    tape = gpu_tape(model.profile, select_tape(model, model.profile, plan), plan)
    return replayed(model.profile, tape, plan, scratch_on=0).peak


def walked(model: Resolved, plan: Plan, gpu: Gpu, conf: AllocatorConf, *, available_bytes: int) -> Reserved:
    """A plan through the caching allocator on its GPU, and whether what it then holds, beside what CUDA and NCCL take, is
    within `available_bytes`. Cheaper than a whole row.

    Its verdict is `fits` or `does_not_fit`: steps that run only once cached memory of theirs is given back count as the latter.
    """
    from fsdp_advisor.memory.allocator import reserve

    assert model.profile is not None
    overhead = device_overhead(gpu, plan)
    room = gpu.memory_bytes - overhead.middle_bytes
    collects = conf.collects_garbage  # what it reserves hangs on the limit
    walk = partial(
        reserve,
        model.profile,
        gpu_tape(model.profile, select_tape(model, model.profile, plan), plan, gpu),
        plan,
        conf=conf,
        limit_bytes=room if collects else None,
        device_bytes=gpu.memory_bytes,
        workspace_bytes=cublas_workspace_bytes(gpu.compute_capability),
        resident_threads=gpu.resident_threads,
    )
    loading = loading_of(model.profile, plan, gpu, overhead)
    found = walk(loading=loading)
    refused_at = min(room, int(conf.per_process_memory_fraction * gpu.memory_bytes))
    most = min(refused_at, available_bytes - overhead.middle_bytes)
    runs = found.verdict == "fits" if collects else found.reserved_peak_bytes <= refused_at
    if not runs and not collects and loading.placed and walk().reserved_peak_bytes <= most:
        within = walk(loading=loading, limit_bytes=room)  # what loading left is given back
        if within.verdict == "fits":
            found, runs = within, True
    return replace(found, verdict="fits" if runs and found.reserved_peak_bytes <= most else "does_not_fit")


def reserved_beside(
    overhead: DeviceOverhead,
    profile: Profile,
    tape: Tape,
    plan: Plan,
    gpu: Gpu,
    *,
    conf: AllocatorConf | None,
    workspace_bytes: int,
    loading: Loading | None = None,
) -> tuple[Reserved, Verdict]:
    """A plan through the caching allocator in what `overhead` leaves of the GPU, and the verdict on both together."""
    from fsdp_advisor.memory.allocator import reserve

    reserved = reserve(
        profile,
        tape,
        plan,
        conf=conf,
        limit_bytes=gpu.memory_bytes - overhead.middle_bytes,
        device_bytes=gpu.memory_bytes,
        workspace_bytes=workspace_bytes,
        resident_threads=gpu.resident_threads,
        loading=loading,
    )
    judged = verdict(
        overhead, gpu, allocated_bytes=reserved.allocated_peak_bytes, reserved_bytes=reserved.reserved_peak_bytes
    )
    return reserved, judged


def step_seconds(model: Resolved, plan: Plan, gpu: Gpu) -> float | None:
    """The time of a plan's step alone; None where it is not known."""
    if model.profile is None:
        return None
    key, tape = select_tape(model, model.profile, plan)
    step = step_of(model.profile, key, tape, plan, gpu)
    return None if step is None else step.seconds


def _allocator_conf(request: EstimateRequest) -> AllocatorConf | None:
    if request.allocator_conf is None:
        return None
    from fsdp_advisor.memory.allocator import AllocatorConf

    return AllocatorConf.parse(request.allocator_conf)


def _seq_len(request: EstimateRequest, profile: Profile | None) -> tuple[int, list[str]]:
    """The sequence length of the request, or else the model's; that one alone where images are read. And notes."""
    if profile is not None and not (task := task_of(profile.task)).takes_any_length:
        own = profile.image_tokens or 1
        left_aside = request.seq_len not in (None, own)
        return own, [f"seq_len {request.seq_len} is left aside: the model reads {task.of_length(own)}"] * left_aside
    limit = profile.max_seq_len if profile else None
    seq_len = request.seq_len or (min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN)
    past = limit is not None and seq_len > limit
    return seq_len, [f"seq_len {seq_len} is past the model's maximum of {limit} tokens"] * past


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


def _estimate(
    model: Resolved,
    profile: Profile,
    plan: Plan,
    gpu: Gpu,
    explain: bool,
    walk: Walk,
    conf: AllocatorConf | None,
    host_memory_bytes: int | None,
) -> StrategyEstimate:
    states = states_of(profile, plan)
    kept = {
        "parameters": states.parameters.exact,
        "gradients": states.gradients.exact,
        "optimizer": states.optimizer.exact,
        "communication": states.communication.exact,
        "buffers": states.buffers.exact,
    }
    host = host_memory(profile, plan)
    warnings = tuple(padding_warnings(profile, plan)) if plan.backend == "fsdp2" else ()
    unknown = not_modelled(profile, plan)
    if (why := why_unknown(plan, gpu)) is not None:
        unknown.append(f"{TIME_UNKNOWN}: {why}")
    copy = one_copy_bytes(profile, plan)
    loading = {"one_copy": copy, "every_rank": copy * plan.ranks_per_node}
    overhead = device_overhead(gpu, plan)
    job_of = partial(
        job_peaks, profile, plan, gpu, states=states, host=host, overhead=overhead, host_memory_bytes=host_memory_bytes
    )
    try:
        key, tape = select_tape(model, profile, plan)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and model.source != "catalog":
            raise  # nothing can be said; of a catalogued model the other strategies can
        total = sum(h.rounded for h in (states.parameters, states.gradients, states.optimizer, states.communication))
        job = job_of(phase_peaks=None)
        return StrategyEstimate(
            plan=plan,
            fits=False if total + overhead.low_bytes > gpu.memory_bytes or job.fails else None,
            fits_by="states",
            needed_bytes=None,
            headroom_bytes=None,
            peak_tensor_bytes=None,
            peak_phase=None,
            peak_where=None,
            phase_peaks=None,
            states=kept,
            at_peak=None,
            host_bytes_per_node=host.steady,
            host_loading_bytes_per_node=loading,
            fused_loss_peak_bytes=None,
            overhead=overhead,
            job=job,
            warnings=warnings,
            not_modelled=(f"{PEAKS_UNKNOWN if why else f'{PEAKS_UNKNOWN}, {TIME_UNKNOWN}'}: {error}", *unknown),
        )
    if key.engine != tape_key_of(plan).engine:
        unknown.append(NO_AUTOCAST)
    if key.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention: {key.attention} is taken",)
    ledger = replayed(profile, tape, plan)
    real = gpu_tape_key_of(profile, key, plan, gpu)
    on_gpu = profile.tapes.get(real.name) or tape
    if key.attention != "eager" and (real.device == "cpu" or real.name not in profile.tapes):
        unknown.append(NO_SCRATCH)
    workspace_bytes = cublas_workspace_bytes(gpu.compute_capability)
    taken = allocated(profile, on_gpu, plan, workspace_bytes=workspace_bytes, resident_threads=gpu.resident_threads)
    judged = verdict(overhead, gpu, allocated_bytes=taken.peak_bytes)
    job = job_of(phase_peaks=taken.step.phase_peaks)
    reserved = None
    if judged.certain in _WALKED_AFTER[walk]:
        reserved, judged = reserved_beside(
            overhead, profile, on_gpu, plan, gpu, conf=conf, workspace_bytes=workspace_bytes, loading=job.loading
        )
        warnings += _allocator_warnings(reserved)
    runs = judged.needed_bytes <= gpu.memory_bytes if reserved is None else reserved.verdict != "does_not_fit"
    step = step_of(profile, key, tape, plan, gpu)
    warnings += difference_on_gpu(real, ledger.peak, taken.tensor_bytes)
    return StrategyEstimate(
        plan=plan,
        fits=runs and job.fails is None,
        fits_by="peak_device_bytes" if reserved is not None else judged.by,
        needed_bytes=judged.needed_bytes,
        headroom_bytes=gpu.memory_bytes - judged.needed_bytes,
        peak_tensor_bytes=ledger.peak,
        peak_phase=ledger.peak_phase,
        peak_where=ledger.peak_where,
        phase_peaks=ledger.phase_peaks,
        states=kept,
        at_peak=dict(zip(ACCOUNTS, ledger.at_peak, strict=False)),
        host_bytes_per_node=host.steady,
        host_loading_bytes_per_node=loading,
        fused_loss_peak_bytes=replayed(profile, tape, plan, fused_loss=True).peak if explain else None,
        allocated=taken,
        reserved=reserved,
        verdict=judged,
        step=step,
        overhead=overhead,
        job=job,
        warnings=warnings + (step.warnings if step else ()),
        not_modelled=tuple(unknown if reserved is not None else [NOT_WALKED, *unknown]),
        replay_timeline=partial(_timeline, profile, tape, on_gpu, plan, gpu),
    )


def _timeline(profile: Profile, tape: Tape, on_gpu: Tape, plan: Plan, gpu: Gpu, there: bool) -> tuple[Point, ...]:
    if there:
        return timeline_of(profile, on_gpu, plan, scratch_on=gpu.resident_threads)
    return timeline_of(profile, tape, plan)


def _allocator_warnings(reserved: Reserved) -> tuple[str, ...]:
    """What a walk through the allocator found that the figures do not tell."""
    if reserved.verdict in (None, "fits"):
        return ()
    helps = "; PYTORCH_ALLOC_CONF=expandable_segments:True would help" if reserved.expandable_segments_help else ""
    if reserved.verdict == "fits_with_retries":
        often = {0: "in some steps", 1: "once a step"}.get(n := reserved.retries_per_step, f"{n} times a step")
        return (
            f"it fits only while the allocator gives cached memory back to the driver and asks again, {often}, which is slow{helps}",
        )
    return (f"fragmentation included it does not fit{helps}",) if helps else ()


def step_of(profile: Profile, key: TapeKey, tape: Tape, plan: Plan, gpu: Gpu) -> StepTime | None:
    """The time of a plan's step on a GPU, where sdpa runs its kernels; between nodes its `inter_node` link."""
    between: Link = gpu.inter_node or ETHERNET_100G
    return step_time(profile, gpu_tape(profile, (key, tape), plan), plan, gpu, between)


def streams_of(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[Interval, ...]:
    """What computes and what is sent through the plan's last micro-batch and step; empty where the time is not known."""
    if model.profile is None:
        return ()
    tape = gpu_tape(model.profile, select_tape(model, model.profile, plan), plan)
    return timeline(model.profile, tape, plan, gpu, gpu.inter_node or ETHERNET_100G)


def _count_estimate(parameters: int, plan: Plan, gpu: Gpu) -> StrategyEstimate:
    states = textbook_states(parameters, plan)
    return StrategyEstimate(
        plan=plan,
        fits=False if states.total > gpu.memory_bytes else None,
        fits_by="states",
        needed_bytes=None,
        headroom_bytes=None,
        peak_tensor_bytes=None,
        peak_phase=None,
        peak_where=None,
        phase_peaks=None,
        states={"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer},
        at_peak=None,
        host_bytes_per_node=states.host_per_node,
        host_loading_bytes_per_node=None,
        fused_loss_peak_bytes=None,
        not_modelled=(
            f"{PEAKS_UNKNOWN}: a bare parameter count says nothing of activations, logits, gathered units and buckets",
            f"{TIME_UNKNOWN}: a bare parameter count has no operators to time",
        ),
    )
