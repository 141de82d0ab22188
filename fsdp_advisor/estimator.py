"""Estimate a job: from a request and a model to a report. The interfaces call this module; it calls all models of memory and
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp_advisor.engines.deepspeed.settings import hidden_size
from fsdp_advisor.engines.fsdp2.units import unit_warnings
from fsdp_advisor.engines.host import host_memory
from fsdp_advisor.engines.job_peaks import job_peaks
from fsdp_advisor.engines.loading import one_copy_bytes
from fsdp_advisor.engines.registry import not_modelled, refusal, states_of, step_program
from fsdp_advisor.engines.textbook import textbook_states
from fsdp_advisor.engines.transfer import LoadMethod
from fsdp_advisor.engines.units_summary import units_text, wrap_warnings
from fsdp_advisor.errors import AdvisorError, MissingExtra, UsageError
from fsdp_advisor.hardware import (
    Gpu,
    attached_gpu,
    find_gpu,
    find_interconnect,
    usual_gpus_per_node,
    usual_nodes,
)
from fsdp_advisor.hardware.links import ETHERNET_100G
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.compatibility import label, plans
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES, FRAMEWORKS
from fsdp_advisor.job.ignored import ignored_in_estimate
from fsdp_advisor.job.keywords import EstimateOptions, with_signature_of
from fsdp_advisor.job.parsing import make_request as make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import AnyRequest, EstimateRequest, RecommendRequest
from fsdp_advisor.memory.allocator import (
    AllocatorConf,
    AllocatorResult,
    StepOperations,
    completes,
    simulate_allocator,
    step_operations,
)
from fsdp_advisor.memory.device import DeviceOverhead, device_overhead
from fsdp_advisor.memory.libraries import WORKSPACES, cublas_workspace_bytes
from fsdp_advisor.memory.live import StepPeak, TimelinePoint, peak_bytes, step_peak, step_timeline
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.resolve import Resolved, resolve, split_recorder
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.program.storages import States
from fsdp_advisor.report import Adapters, Report, StrategyEstimate
from fsdp_advisor.tapes import gpu_tape, gpu_tape_key_of, select_tape, tape_key_of
from fsdp_advisor.timing import Interval, StepTime, step_time, timeline, why_unknown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fsdp_advisor.configs import ConfigFiles

DEFAULT_GPU = "H100-80GB"
DEFAULT_SEQ_LEN = 2048
TIME_UNKNOWN = "tokens_per_second_per_gpu, step_seconds"
PEAKS_UNKNOWN = "the peak, peak_allocated_bytes, peak_reserved_bytes, peak_device_bytes"
NO_AUTOCAST = (
    "the casts of autocast, under which accelerate runs FSDP1: they are not recorded here; recording needs torch"
)
NO_SCRATCH = "peak_allocated_bytes: the workspace of the attention kernel"


@with_signature_of(EstimateRequest)
def estimate(
    request: EstimateRequest | None = None,
    /,
    *,
    explain: bool = False,
    config_file: ConfigFiles = (),
    **options: Unpack[EstimateOptions],
) -> Report:
    """The report of one job under one strategy or all of them.

    Takes an `EstimateRequest`, or its fields as keywords; `model` may also be what `record_module` returns. `config_file` names
    configuration files of other tools; keywords win over them. `explain` adds the peak with a fused loss, which only an
    explanation needs. Raises AdvisorError with a hint.
    """
    fields, model = split_recorder({**options, "config_file": config_file})
    request = settled(request or requested(fields, EstimateRequest))
    return estimate_resolved(request, model or resolve(request.model), explain=explain)


def requested(fields: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """The request of these fields, and of the configuration files that they name. Raises UsageError."""
    fields = with_files_read(fields)
    if not fields.get("config_file"):
        return make_request({name: value for name, value in fields.items() if name != "config_file"}, kind)
    from fsdp_advisor import configs  # most jobs need none of its readers

    return configs.make_request(fields, kind)


def settled(request: AnyRequest) -> AnyRequest:
    """The request with what is implied for options that were not given: the number of nodes and fp16 without bf16 by its GPU,
    checkpointing by its framework, and in a search a frozen base in bf16.

    `assumed` names them. A request that was constructed directly is taken as it is.
    """
    if not request.given:
        return request
    gpu, _ = choose_gpu(request.gpu)
    found: dict[str, Any] = {}
    varies_gpus = isinstance(request, RecommendRequest) and request.find == "gpus"
    if "nnodes" not in request.given and not varies_gpus and (nodes := usual_nodes(request.gpus, gpu)) > 1:
        found["nnodes"] = nodes
    if "precision" not in request.given and gpu.lacks_bf16:
        found["precision"] = "fp16-mixed"
    elif isinstance(request, RecommendRequest) and _may_store_half(request):
        found["dtype"] = "bfloat16"
    is_open = "activation_checkpointing" not in request.given and not isinstance(request, RecommendRequest)
    if is_open and FRAMEWORKS[request.framework].checkpoints:
        found["activation_checkpointing"] = "full"
    return replace(request, **found, assumed=frozenset(found))


def _may_store_half(request: RecommendRequest) -> bool:
    """Whether a search may choose bf16 for the weights: the base of adapters is frozen. FSDP1 flattens one dtype."""
    open_dtype = "dtype" not in request.given and request.backend != "fsdp1"
    return open_dtype and request.precision == "bf16-mixed" and bool(adaptation_of(request).peft)


def _assumptions(request: EstimateRequest, gpu: Gpu) -> list[str]:
    """A note per option that `settled` filled in."""
    notes = []
    if "nnodes" in request.assumed:
        per_node = f"{request.gpus // request.nnodes} GPUs each"
        notes.append(
            f"{request.nnodes} nodes of {per_node} are assumed, because {gpu.name} usually has "
            f"{usual_gpus_per_node(gpu)} per node; nnodes changes it"
        )
    if "precision" in request.assumed:
        notes.append(f"precision {request.precision} is assumed, because {gpu.name} does not compute in bf16")
    if "activation_checkpointing" in request.assumed:
        notes.append(
            f"{FRAMEWORK_NAMES[request.framework]} checkpoints activations unless activation_checkpointing is none"
        )
    if "dtype" in request.assumed:
        notes.append(f"the frozen base is stored in {request.dtype}, as transformers loads it; dtype changes it")
    elif _stores_frozen_base_in_fp32(request):
        notes.append("the frozen base is stored in fp32, as bf16-mixed has it; dtype bfloat16 halves it")
    return notes


def _stores_frozen_base_in_fp32(request: EstimateRequest) -> bool:
    adaptation = adaptation_of(request)
    whole = bool(adaptation.peft) and not adaptation.quantization
    return whole and request.precision == "bf16-mixed" and request.dtype == "auto"


def estimate_resolved(request: EstimateRequest, model: Resolved, *, explain: bool = False) -> Report:
    """`estimate` for a model that is already resolved."""
    request = divided(request)
    model = model.adapted(adaptation_of(request))
    gpu, notes = gpu_of(request)
    conf = AllocatorConf.parse(request.allocator_conf) if request.allocator_conf else None
    seq_len, length_notes = _seq_len(request, model.profile)
    profile = model.profile
    possible, refused = _possible(plans(request, seq_len=seq_len), profile)
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
            estimate_plan(model, plan, gpu, explain=explain, conf=conf, host_memory_bytes=request.host_memory)
            for plan in possible
        ),
        task=profile.task if profile else None,
        layer_classes=profile.layer_classes if profile else (),
        largest_parameter_elements=profile.largest_parameter_elements if profile else None,
        hidden_size=hidden_size(profile) if profile else None,
        adapters=Adapters(method=method, parameters=profile.adapter_parameters)
        if profile and (method := model.adaptation.method)
        else None,
        notes=(
            *model.notes,
            *notes,
            *_assumptions(request, gpu),
            *length_notes,
            *refused,
            *ignored_in_estimate(request),
        ),
    )


def _possible(wanted: Sequence[Plan], profile: Profile | None) -> tuple[list[Plan], list[str]]:
    """The plans that can train the model, and a note on each other one. Raises UsageError if there is none."""
    possible, notes = [], []
    error: UsageError | None = None
    for plan in wanted:
        found = None if profile is None else refusal(profile, plan)
        if found is None:
            possible.append(plan)
        else:
            error = found
            notes.append(f"{label(plan.strategy, plan.offload)} is left out: {found.message}; {found.hint}")
    if error is not None and not possible:
        raise error
    return possible, notes


def estimate_plan(
    model: Resolved,
    plan: Plan,
    gpu: Gpu,
    *,
    explain: bool = False,
    conf: AllocatorConf | None = None,
    host_memory_bytes: int | None = None,
) -> StrategyEstimate:
    """One row of a report. `conf`: the allocator's settings. `host_memory_bytes`: memory of one node's host, None if
    unlimited.
    """
    if model.profile is None:
        return _count_estimate(model.parameters, plan, gpu)
    try:
        key, tape = select_tape(model, model.profile, plan)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and model.source != "catalog":
            raise  # without torch no strategy has a tape; a catalog model may have the tapes of other strategies
        base = _without_step(model.profile, plan, gpu, host_memory_bytes)
        time = "" if why_unknown(plan, gpu) else f", {TIME_UNKNOWN}"
        return replace(base, not_modelled=(f"{PEAKS_UNKNOWN}{time}: {error.message}", *base.not_modelled))
    return _with_step(model.profile, key, tape, plan, gpu, explain, conf, host_memory_bytes)


def tensor_bytes(model: Resolved, plan: Plan) -> int:
    """Peak tensor bytes of a plan's step on a GPU, a lower bound of its memory. Raises AdvisorError if there is no tape."""
    assert model.profile is not None
    tape = gpu_tape(model.profile, select_tape(model, model.profile, plan), plan)
    return _peak_bytes(model.profile, tape, plan)


def peak_of_step(profile: Profile, tape: Tape, plan: Plan) -> StepPeak:
    """The peak of a plan's step over a tape."""
    return step_peak(step_program(profile, tape, plan), plan.micro_batch_size, plan.seq_len)


def _peak_bytes(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False) -> int:
    program = step_program(profile, tape, plan)
    return peak_bytes(program, plan.micro_batch_size, plan.seq_len, fused_loss=fused_loss)


def timeline_of_step(profile: Profile, tape: Tape, plan: Plan) -> tuple[TimelinePoint, ...]:
    """Live memory through a plan's step over a tape."""
    return step_timeline(step_program(profile, tape, plan), plan.micro_batch_size, plan.seq_len)


def step_seconds(model: Resolved, plan: Plan, gpu: Gpu) -> float | None:
    """Seconds of a plan's step, without allocator retries; None if unknown."""
    if model.profile is None:
        return None
    key, tape = select_tape(model, model.profile, plan)
    step = step_of(model.profile, key, tape, plan, gpu)
    return None if step is None else step.seconds


def _seq_len(request: EstimateRequest, profile: Profile | None) -> tuple[int, list[str]]:
    """The request's sequence length, or else the model's, and notes. A model that reads images has only its own length."""
    if profile is not None and not (task := task_of(profile.task)).takes_any_length:
        own = profile.image_tokens or 1
        left_aside = request.seq_len not in (None, own)
        return own, [f"seq_len {request.seq_len} is left aside: the model reads {task.of_length(own)}"] * left_aside
    limit = profile.max_seq_len if profile else None
    seq_len = request.seq_len or (min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN)
    past = limit is not None and seq_len > limit
    return seq_len, [f"seq_len {seq_len} is past the model's maximum of {limit} tokens"] * past


def gpu_of(request: EstimateRequest) -> tuple[Gpu, list[str]]:
    """The request's GPU with the request's network between nodes, and notes on assumed values."""
    gpu, notes = choose_gpu(request.gpu)
    if request.interconnect is not None:
        gpu = replace(gpu, inter_node=find_interconnect(request.interconnect, gpu, request.gpus // request.nnodes))
    return gpu, notes


def choose_gpu(name: str | None) -> tuple[Gpu, list[str]]:
    """The named GPU, or else the attached one, or else the default; and a note if no name was given."""
    if name is not None:
        return find_gpu(name), []
    if (gpu := attached_gpu()) is not None:
        return gpu, [f"GPU: {gpu.name}, the one attached"]
    return find_gpu(DEFAULT_GPU), [f"GPU: none attached, so {DEFAULT_GPU} is assumed; say --gpu for another"]


def _without_step(
    profile: Profile, plan: Plan, gpu: Gpu, host_memory_bytes: int | None, tensors: StepPeak | None = None
) -> StrategyEstimate:
    """The row of a plan without a tape: states, host memory, loading and saving. `tensors`: the step's, if they are known."""
    states = states_of(profile, plan)
    host = host_memory(profile, plan)
    unknown = not_modelled(profile, plan)
    if (why := why_unknown(plan, gpu)) is not None:
        unknown.append(f"{TIME_UNKNOWN}: {why}")
    copy = one_copy_bytes(profile, plan)
    overhead = device_overhead(gpu, plan)
    job = job_peaks(
        profile,
        plan,
        gpu,
        states=states,
        host=host,
        overhead=overhead,
        phase_peaks=tensors.phase_peaks if tensors else None,
        host_memory_bytes=host_memory_bytes,
    )
    kept = sum(s.rounded for s in (states.parameters, states.gradients, states.optimizer, states.communication))
    return StrategyEstimate(
        plan=plan,
        fits=False if kept + overhead.low_bytes > gpu.memory_bytes or job.fails else None,
        states={
            "parameters": states.parameters.exact,
            "gradients": states.gradients.exact,
            "optimizer": states.optimizer.exact,
            "communication": states.communication.exact,
            "buffers": states.buffers.exact,
        },
        parameter_parts=_parameter_parts(profile, plan, states),
        paged_optimizer_bytes=states.paged.exact,
        host_bytes_per_node=host.steady,
        host_loading_bytes_per_node={"one_copy": copy, "every_rank": copy * plan.ranks_per_node},
        overhead=overhead,
        job=job,
        units=units_text(profile, plan) if plan.wrap != "layer" else None,
        warnings=(*(unit_warnings(profile, plan) if plan.backend == "fsdp2" else ()), *wrap_warnings(profile, plan)),
        not_modelled=tuple(unknown),
    )


def _parameter_parts(profile: Profile, plan: Plan, states: States) -> dict[str, int] | None:
    """The bytes of rank 0's parameters in the base and in the adapters; None for a model without adapters."""
    if not profile.adapter_parameters:
        return None
    adapters = states_of(profile.saved, plan).parameters.exact
    return {"base": states.parameters.exact - adapters, "adapters": adapters}


def _with_step(
    profile: Profile,
    key: TapeKey,
    tape: Tape,
    plan: Plan,
    gpu: Gpu,
    explain: bool,
    conf: AllocatorConf | None,
    host_memory_bytes: int | None,
) -> StrategyEstimate:
    """The row of a plan with its step: tensors, allocator, verdict and time."""
    gpu_key = gpu_tape_key_of(profile, key, plan, gpu)
    on_gpu = profile.tapes.get(gpu_key.name) or tape
    tensors = peak_of_step(profile, on_gpu, plan)
    base = _without_step(profile, plan, gpu, host_memory_bytes, tensors)
    overhead, job, unknown = base.overhead, base.job, list(base.not_modelled)
    assert overhead is not None and job is not None
    if key.engine != tape_key_of(plan, profile).engine:
        unknown.append(NO_AUTOCAST)
    if key.attention != "eager" and (gpu_key.device == "cpu" or gpu_key.name not in profile.tapes):
        unknown.append(NO_SCRATCH)
    warnings = base.warnings
    if key.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention; {key.attention} is used",)
    allocator = allocator_result(profile, on_gpu, plan, gpu, conf=conf, overhead=overhead, loading=job.load_method)
    step = step_of(profile, key, tape, plan, gpu)
    if step is not None:
        step = step.with_retries(allocator.retries_per_step)
        left = gpu.memory_bytes - overhead.middle_bytes - allocator.reserved_peak_bytes
        step = step.with_paging(base.paged_optimizer_bytes, left, gpu)
    needed = overhead.middle_bytes + max(allocator.reserved_peak_bytes, job.phases["load"].gpu_bytes or 0, job.phases["save"].gpu_bytes or 0)  # fmt: skip
    available = min(gpu.memory_bytes, overhead.middle_bytes + _allowed_bytes(gpu, conf))
    return replace(
        base,
        fits=needed <= available and job.fails is None,
        needed_bytes=needed,
        headroom_bytes=available - needed,
        peak_tensor_bytes=tensors.peak,
        peak_phase=tensors.phase,
        peak_where=tensors.where,
        phase_peaks=tensors.phase_peaks,
        at_peak=tensors.at_peak,
        fused_loss_peak_bytes=_peak_bytes(profile, on_gpu, plan, fused_loss=True) if explain else None,
        allocator=allocator,
        step=step,
        warnings=warnings + _allocator_warnings(allocator) + (step.warnings if step else ()),
        not_modelled=tuple(unknown),
        simulate_peak=partial(_peak_bytes, profile, tape, plan),
        replay_timeline=partial(timeline_of_step, profile, on_gpu, plan),
    )


def _allowed_bytes(gpu: Gpu, conf: AllocatorConf | None) -> int:
    """The bytes of the GPU that PyTorch may reserve under the allocator's settings."""
    return gpu.memory_bytes if conf is None else int(conf.per_process_memory_fraction * gpu.memory_bytes)


def allocator_result(
    profile: Profile,
    tape: Tape,
    plan: Plan,
    gpu: Gpu,
    *,
    conf: AllocatorConf | None = None,
    overhead: DeviceOverhead | None = None,
    workspace_bytes: int | None = None,
    loading: LoadMethod | None = None,
) -> AllocatorResult:
    """The result of the caching allocator for the plan's steps, in the GPU memory that CUDA and NCCL (`overhead`) leave."""
    overhead = overhead or device_overhead(gpu, plan)
    return simulate_allocator(
        _operations(profile, tape, plan, gpu, workspace_bytes, loading),
        conf=conf,
        limit_bytes=gpu.memory_bytes - overhead.middle_bytes,
        device_bytes=gpu.memory_bytes,
    )


def runs_in(
    model: Resolved, row: StrategyEstimate, gpu: Gpu, memory_bytes: int, conf: AllocatorConf | None = None
) -> bool:
    """Whether a job with this estimate also completes if the GPU had only `memory_bytes`: in each phase, and in the allocator."""
    profile, plan, overhead, allocator, job = model.profile, row.plan, row.overhead, row.allocator, row.job
    if profile is None or overhead is None or allocator is None or job is None:
        return False
    left = memory_bytes - overhead.middle_bytes
    if max(allocator.allocated_peak_bytes, *(job.phases[name].gpu_bytes or 0 for name in ("load", "save"))) > left:
        return False
    on_gpu = gpu_tape(profile, select_tape(model, profile, plan), plan, gpu)
    operations = _operations(profile, on_gpu, plan, gpu, None, job.load_method)
    return completes(operations, conf=conf, limit_bytes=left, device_bytes=memory_bytes)


def _operations(
    profile: Profile, tape: Tape, plan: Plan, gpu: Gpu, workspace_bytes: int | None, loading: LoadMethod | None
) -> StepOperations:
    """The allocator's operations of a plan's steps over a tape. `workspace_bytes` of cuBLAS: by default the GPU's."""
    workspace = cublas_workspace_bytes(gpu.compute_capability) if workspace_bytes is None else workspace_bytes
    return step_operations(
        step_program(profile, tape, plan),
        plan.micro_batch_size,
        plan.seq_len,
        resident_threads=gpu.resident_threads,
        workspace_bytes=[workspace] * WORKSPACES,
        loaded=loading.transfers if loading else (),
    )


def _allocator_warnings(allocator: AllocatorResult) -> tuple[str, ...]:
    """Warnings of the allocator's simulation: retries or fragmentation."""
    if allocator.verdict == "fits":
        return ()
    helps = "; PYTORCH_ALLOC_CONF=expandable_segments:True avoids it" if allocator.expandable_segments_help else ""
    if allocator.verdict == "fits_with_retries":
        times = "once" if allocator.retries_per_step == 1 else f"{allocator.retries_per_step} times"
        return (
            f"the allocator frees its cache and asks the driver again {times} per step, which the step time includes{helps}",
        )
    return (f"fragmentation makes it exceed the GPU{helps}",) if helps else ()


def step_of(profile: Profile, key: TapeKey, tape: Tape, plan: Plan, gpu: Gpu) -> StepTime | None:
    """The time of a plan's step on a GPU. Ranks reach other nodes over the GPU's `inter_node` link."""
    program = step_program(profile, gpu_tape(profile, (key, tape), plan), plan)
    return step_time(profile, program, plan, gpu, gpu.inter_node or ETHERNET_100G)


def streams_of(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[Interval, ...]:
    """Compute and communication of the plan's last micro-batch and optimizer step; empty if the time is unknown."""
    if model.profile is None:
        return ()
    tape = gpu_tape(model.profile, select_tape(model, model.profile, plan), plan)
    return timeline(model.profile, step_program(model.profile, tape, plan), plan, gpu, gpu.inter_node or ETHERNET_100G)


def _count_estimate(parameters: int, plan: Plan, gpu: Gpu) -> StrategyEstimate:
    states = textbook_states(parameters, plan)
    return StrategyEstimate(
        plan=plan,
        fits=False if states.total > gpu.memory_bytes else None,
        states={"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer},
        host_bytes_per_node=states.host_per_node,
        not_modelled=(
            f"{PEAKS_UNKNOWN}: a bare parameter count says nothing of activations, logits, gathered units and buckets",
            f"{TIME_UNKNOWN}: a bare parameter count has no operators to time",
        ),
    )
