"""The estimate of one plan, which is a row of a report: live memory, the allocator and time of its step program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from fsdp_advisor.engines.evaluation import kept_logits
from fsdp_advisor.engines.fsdp2.units import unit_warnings
from fsdp_advisor.engines.host import host_memory
from fsdp_advisor.engines.job_peaks import bytes_between_steps, job_peaks
from fsdp_advisor.engines.learned import gradient_warnings, learned
from fsdp_advisor.engines.loading import one_copy_bytes
from fsdp_advisor.engines.model_outputs import searches_unused
from fsdp_advisor.engines.registry import not_modelled, states_of, step_program
from fsdp_advisor.engines.rollouts import batch_warnings, evaluation_peak
from fsdp_advisor.engines.textbook import textbook_states
from fsdp_advisor.engines.transfer import LoadMethod
from fsdp_advisor.engines.units_summary import packed_warnings, units_text, wrap_warnings
from fsdp_advisor.errors import AdvisorError, MissingExtra, UsageError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.links import ETHERNET_100G
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import (
    AllocatorConf,
    AllocatorResult,
    StepOperations,
    completes,
    simulate_allocator,
    step_operations,
    with_evaluation,
    with_graph,
)
from fsdp_advisor.memory.device import DeviceOverhead, device_overhead
from fsdp_advisor.memory.libraries import cublas_workspace_bytes
from fsdp_advisor.memory.live import StepPeak, TimelinePoint, peak_bytes, step_peak, step_timeline
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.program.storages import States
from fsdp_advisor.report import NotModelled, StrategyEstimate
from fsdp_advisor.tapes import (
    SelectedTape,
    gpu_tape,
    gpu_tape_key_of,
    select_tape,
    takes_long_on_cpu,
    tape_for_search,
    tape_key_of,
    tape_of_row,
)
from fsdp_advisor.timing import Interval, StepTime, step_time, timeline, why_unknown

TIME_UNKNOWN = "tokens_per_second_per_gpu, step_seconds"
PEAKS_UNKNOWN = "the peak, peak_allocated_bytes, peak_reserved_bytes, peak_device_bytes"
NO_REENTRANT = "reentrant checkpoints, whose backward keeps one more hidden state and repeats all of a layer"
NO_AUTOCAST = (
    "the casts of autocast, which accelerate uses with FSDP1: no recording of them is stored, and a new one needs torch"
)
NO_LINEAR_INPUTS = (
    "inputs of linear layers with frozen weights, which ZeRO-3 keeps for backward (4.9 GB for LoRA of an 8B model at 4,096 tokens without"
    " checkpointing): no recording of them is stored, and a new one needs torch"
)
NO_SCRATCH = NotModelled("the workspace of the attention kernel", figures="peak_allocated_bytes")


remembered = lru_cache(maxsize=1024)
"""A cache for the functions that take most of a row's time. A search, its explanation and a changed request estimate the same plans
again.
"""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step is computed from. `tape`: with the kernels of the GPU."""

    profile: Profile
    tape: Tape
    plan: Plan
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class _StepTensors:
    """The tape of a step, its peak, and the peak tensor bytes of an evaluation between two steps; None if there is none."""

    tape: Tape
    peak: StepPeak
    evaluation_bytes: int | None


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
        if plan.task != "sft":
            raise UsageError(
                f"{model.name} is a bare parameter count, which has no task {plan.task}", hint="name a model"
            )
        return _count_estimate(model.parameters, plan, gpu)
    try:
        selected = tape_of_row(model, plan, gpu)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and not model.is_catalogued:
            raise  # without torch no strategy has a tape; a catalog model may have the tapes of other strategies
        base = _base_row(model.profile, plan, gpu, host_memory_bytes)
        figures = PEAKS_UNKNOWN if why_unknown(plan, gpu) else f"{PEAKS_UNKNOWN}, {TIME_UNKNOWN}"
        install = f"; {error.hint}" if isinstance(error, MissingExtra) else ""
        unknown = NotModelled(f"{error.message}{install}", figures, hides_needed=True)
        return replace(base, lacks=(unknown, *base.lacks))
    step = StepInput(model.profile, gpu_tape(model.profile, selected, plan, gpu), plan, gpu)
    row = _with_step(model, selected, step, conf, host_memory_bytes)
    if not explain:
        return row
    return replace(row, fused_loss_peak_bytes=_peak_bytes(step.profile, step.tape, plan, fused_loss=True))


def tensor_bytes(model: Resolved, plan: Plan, gpu: Gpu) -> int:
    """Peak tensor bytes of a plan's step, a lower bound of its memory. Raises AdvisorError if there is no tape."""
    assert model.profile is not None
    tape = tape_for_search(model, plan, gpu)
    return _peak_bytes(model.profile, tape, plan)


def _evaluation(model: Resolved, plan: Plan, gpu: Gpu) -> StepInput | None:
    """The input of the Trainer's evaluation; None if the job has none. Raises AdvisorError if there is no tape."""
    own, profile = plan.evaluation_plan, model.profile
    if own is None or profile is None:
        return None
    return StepInput(profile, gpu_tape(profile, tape_of_row(model, own, gpu), own, gpu), own, gpu)


def _evaluation_bytes(step: StepInput, evaluation: StepInput) -> int:
    """Peak tensor bytes of the evaluation between two steps."""
    profile, tape, own = evaluation.profile, evaluation.tape, evaluation.plan
    peak = peak_of_step(profile, tape, own)
    forward = evaluation_peak(profile, own, peak.tape_phase_peaks)
    left = timeline_of_step(profile, tape, own)[-1].live_bytes
    # the evaluation's program has no gradients and optimizer states, which stay on the GPU
    kept = bytes_between_steps(step.plan, states_of(learned(profile, step.tape, step.plan), step.plan))
    of_training = kept - bytes_between_steps(own, states_of(learned(profile, tape, own), own))
    return of_training + kept_logits(profile, step.plan).peak(forward=forward, left=left)


def logits_bytes_at_peak(model: Resolved, plan: Plan, gpu: Gpu) -> int:
    """Bytes by which the peak of a plan's step falls if the loss allocates nothing: the most that a loss without logits can save."""
    assert model.profile is not None
    tape = tape_for_search(model, plan, gpu)
    return _peak_bytes(model.profile, tape, plan) - _peak_bytes(model.profile, tape, plan, fused_loss=True)


def peak_of_step(profile: Profile, tape: Tape, plan: Plan) -> StepPeak:
    """The peak of a plan's step over a tape."""
    return step_peak(step_program(profile, tape, plan), *plan.tape_shape)


@remembered
def _peak_bytes(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False) -> int:
    program = step_program(profile, tape, plan)
    return peak_bytes(program, *plan.tape_shape, fused_loss=fused_loss)


def _simulated_peak_bytes(model: Resolved, key: TapeKey, tape: Tape, plan: Plan) -> int | None:
    """The peak of PyTorch's own code on a CPU; None if `key` is a GPU's and the CPU's step is not recorded or takes too long to record."""
    assert model.profile is not None
    if key.device == "gpu" and plan.attention != "flash_attention_2":
        if takes_long_on_cpu(model.profile, plan):
            return None
        try:
            _, tape = select_tape(model, plan)
        except AdvisorError:
            return None
    return _peak_bytes(model.profile, tape, plan)


def timeline_of_step(profile: Profile, tape: Tape, plan: Plan) -> tuple[TimelinePoint, ...]:
    """Live memory through a plan's step over a tape."""
    return step_timeline(step_program(profile, tape, plan), *plan.tape_shape)


def step_seconds(model: Resolved, plan: Plan, gpu: Gpu) -> float | None:
    """Seconds of a plan's step, without allocator retries; None if unknown."""
    if model.profile is None:
        return None
    tape = tape_for_search(model, plan, gpu)
    step = step_of(model.profile, tape, plan, gpu)
    return None if step is None else step.seconds


def _base_row(
    profile: Profile,
    plan: Plan,
    gpu: Gpu,
    host_memory_bytes: int | None,
    step: _StepTensors | None = None,
) -> StrategyEstimate:
    """A row's states, host memory, phases and notes, without the allocator's figures and the time of its step.

    `step`: None if there is no tape. `fits` is False if these parts alone need too much memory, else None (not yet known).
    """
    if step is not None:
        profile = learned(profile, step.tape, plan)
    states = states_of(profile, plan)
    host = None if plan.offloads_to_nvme else host_memory(profile, plan, step.tape if step else None).steady
    lacks = list(map(NotModelled, not_modelled(profile, plan)))
    if (why := why_unknown(plan, gpu)) is not None:
        lacks.append(NotModelled(why, TIME_UNKNOWN))
    copy = one_copy_bytes(profile, plan)
    overhead = device_overhead(gpu, plan)
    job = job_peaks(
        profile,
        plan,
        gpu,
        states=states,
        host=host,
        overhead=overhead,
        tensors=step.peak if step else None,
        evaluation_bytes=step.evaluation_bytes if step else None,
        host_memory_bytes=host_memory_bytes,
    )
    kept = sum(s.rounded for s in (states.parameters, states.gradients, states.optimizer, states.communication))
    return StrategyEstimate(
        plan=plan,
        fits=False if kept + overhead.middle_bytes > gpu.memory_bytes or job.fails else None,
        states={
            "parameters": states.parameters.exact,
            "gradients": states.gradients.exact,
            "optimizer": states.optimizer.exact,
            "communication": states.communication.exact,
            "buffers": states.buffers.exact,
        },
        parameter_parts=_parameter_parts(profile, plan, states),
        paged_optimizer_bytes=states.paged.exact,
        host_bytes_per_node=host,
        host_loading_bytes_per_node={"one_copy": copy, "every_rank": copy * plan.ranks_per_node},
        overhead=overhead,
        job_peaks=job,
        units=units_text(profile, plan) if plan.wrap != "layer" else None,
        warnings=(
            *(unit_warnings(profile, plan) if plan.backend == "fsdp2" else ()),
            *packed_warnings(profile, plan),
            *wrap_warnings(profile, plan),
        ),
        lacks=tuple(lacks),
    )


def _parameter_parts(profile: Profile, plan: Plan, states: States) -> dict[str, int] | None:
    """The bytes of rank 0's parameters in the base and in the adapters; None for a model without adapters."""
    if not profile.adapter_parameters:
        return None
    adapters = states_of(profile.saved, plan).parameters.exact
    return {"base": states.parameters.exact - adapters, "adapters": adapters}


def _with_step(
    model: Resolved,
    selected: SelectedTape,
    step: StepInput,
    conf: AllocatorConf | None,
    host_memory_bytes: int | None,
) -> StrategyEstimate:
    """The whole row of a plan: `_base_row`, tensors, allocator, verdict and time. `selected`: the tape of the plan's code path and its
    key; `step` has the same tape with the kernels of the GPU.
    """
    profile, on_gpu, plan, gpu = step.profile, step.tape, step.plan, step.gpu
    key, tape = selected
    tensors = peak_of_step(profile, on_gpu, plan)
    evaluation: StepInput | None = None
    unknown: tuple[NotModelled, ...] = ()
    try:
        evaluation = _evaluation(model, plan, gpu)
    except AdvisorError as error:
        reason = f"the peak of evaluation, and whether the job fits: {error.message}"
        unknown = (NotModelled(reason, hides_needed=True),)
    evaluated = None if evaluation is None else _evaluation_bytes(step, evaluation)
    base = _base_row(profile, plan, gpu, host_memory_bytes, _StepTensors(on_gpu, tensors, evaluated))
    overhead, job = base.overhead, base.job_peaks
    assert overhead is not None and job is not None
    warnings = base.warnings + gradient_warnings(profile, on_gpu, plan) + batch_warnings(plan)
    if key.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention; {key.attention} is used",)
    simulate = partial(allocator_result, step, conf=conf, overhead=overhead, loading=job.load_method)
    allocator = simulate()
    evaluating = None if evaluation is None else simulate(evaluation=evaluation)
    outside = max(job.bytes_outside_steps, evaluating.reserved_peak_bytes if evaluating else 0)
    needed = overhead.middle_bytes + max(allocator.reserved_peak_bytes, outside)
    available = min(gpu.memory_bytes, overhead.middle_bytes + _allowed_bytes(gpu, conf))
    fits = needed <= available and job.fails is None
    time = _job_time(step, base, allocator)
    row = replace(
        base,
        fits=fits,
        needed_bytes=needed,
        headroom_bytes=available - needed,
        peak_tensor_bytes=tensors.peak,
        peak_phase=tensors.phase,
        peak_where=tensors.where,
        phase_peaks=tensors.phase_peaks,
        at_peak=tensors.at_peak,
        allocator=allocator,
        evaluation=evaluating,
        step=time,
        searches_unused=searches_unused(learned(profile, on_gpu, plan), plan),
        warnings=warnings + _allocator_warnings(allocator) + (time.warnings if time else ()),
        lacks=(
            *unknown,
            *base.lacks,
            *_missing_in_tape(profile, plan, key, gpu_tape_key_of(profile, key, plan, gpu)),
        ),
        simulate_peak=partial(_simulated_peak_bytes, model, key, tape, plan),
        replay_timeline=partial(timeline_of_step, profile, on_gpu, plan),
    )
    if fits and unknown:  # what does not fit without evaluation does not fit with it
        return replace(row, fits=None, needed_bytes=None, headroom_bytes=None)
    if fits and host_memory_bytes is not None and row.host_bytes_per_node is None:
        return replace(row, fits=None)
    return row


def _job_time(step: StepInput, base: StrategyEstimate, allocator: AllocatorResult) -> StepTime | None:
    """The time of a step with the allocator's retries and the paging of optimizer state; None if unknown."""
    time, gpu = step_of(step.profile, step.tape, step.plan, step.gpu), step.gpu
    if time is None or base.overhead is None:
        return None
    left = gpu.memory_bytes - base.overhead.middle_bytes - allocator.reserved_peak_bytes
    return time.with_retries(allocator.retries_per_step).with_paging(base.paged_optimizer_bytes, left, gpu)


def _missing_in_tape(profile: Profile, plan: Plan, key: TapeKey, gpu_key: TapeKey) -> Iterator[NotModelled]:
    """Notes on work of the plan's step that its tape lacks. `key`: the key of the CPU's tape, `gpu_key`: of the tape with the GPU's
    kernels.
    """
    own = tape_key_of(plan, profile)
    if key.engine != own.engine:
        yield NotModelled(NO_AUTOCAST)
    if own.saves_linear_inputs and not key.saves_linear_inputs:
        yield NotModelled(NO_LINEAR_INPUTS)
    if own.checkpointing == "reentrant" != key.checkpointing:
        yield NotModelled(NO_REENTRANT)
    if key.attention != "eager" and (gpu_key.device == "cpu" or gpu_key.name not in profile.tapes):
        yield NO_SCRATCH


def _allowed_bytes(gpu: Gpu, conf: AllocatorConf | None) -> int:
    """The bytes of the GPU that PyTorch may reserve under the allocator's settings."""
    return gpu.memory_bytes if conf is None else int(conf.per_process_memory_fraction * gpu.memory_bytes)


@remembered
def allocator_result(
    step: StepInput,
    *,
    evaluation: StepInput | None = None,
    conf: AllocatorConf | None = None,
    overhead: DeviceOverhead | None = None,
    workspace_bytes: int | None = None,
    loading: LoadMethod | None = None,
) -> AllocatorResult:
    """The result of the caching allocator for several steps, in the GPU memory that CUDA and NCCL (`overhead`) leave.

    `evaluation`: the input of an evaluation between two steps. `workspace_bytes`: of cuBLAS; by default those of the GPU.
    """
    overhead = overhead or device_overhead(step.gpu, step.plan)
    return simulate_allocator(
        _operations(step, evaluation, loading, workspace_bytes),
        conf=conf,
        limit_bytes=step.gpu.memory_bytes - overhead.middle_bytes,
        device_bytes=step.gpu.memory_bytes,
    )


def runs_in(
    model: Resolved, row: StrategyEstimate, gpu: Gpu, memory_bytes: int, conf: AllocatorConf | None = None
) -> bool:
    """Whether the job of `row` would complete on a GPU with only `memory_bytes`: each phase fits, and the allocator completes the steps."""
    profile, plan, overhead, allocator, job = model.profile, row.plan, row.overhead, row.allocator, row.job_peaks
    if profile is None or overhead is None or allocator is None or job is None:
        return False
    left = memory_bytes - overhead.middle_bytes
    if max(allocator.allocated_peak_bytes, job.bytes_outside_steps) > left:
        return False
    step, evaluation = StepInput(profile, tape_for_search(model, plan, gpu), plan, gpu), _evaluation(model, plan, gpu)
    return _completes(step, evaluation, job.load_method, conf, limit_bytes=left, device_bytes=memory_bytes)


@remembered
def _completes(
    step: StepInput,
    evaluation: StepInput | None,
    loading: LoadMethod,
    conf: AllocatorConf | None,
    *,
    limit_bytes: int,
    device_bytes: int,
) -> bool:
    """Whether the steps, and an evaluation if there is one, run in `limit_bytes` of a device with `device_bytes`."""
    operations = _operations(step, evaluation, loading)
    return completes(operations, conf=conf, limit_bytes=limit_bytes, device_bytes=device_bytes)


def _operations(
    step: StepInput, evaluation: StepInput | None, loading: LoadMethod | None, workspace_bytes: int | None = None
) -> StepOperations:
    """The allocator's operations of the step, and of an evaluation if there is one."""
    plan, gpu = step.plan, step.gpu
    workspace = cublas_workspace_bytes(gpu.compute_capability) if workspace_bytes is None else workspace_bytes
    operations = step_operations(
        step_program(step.profile, step.tape, plan),
        *plan.tape_shape,
        resident_threads=gpu.resident_threads,
        workspace_bytes=[workspace] * plan.facts.threads,
        loaded=loading.transfers if loading else (),
    )
    if plan.captures_graph:
        operations = with_graph(operations)
    if evaluation is None:
        return operations
    kept = kept_logits(step.profile, plan)
    return with_evaluation(operations, _operations(evaluation, None, None), before=kept.before, after=kept.after)


def _allocator_warnings(allocator: AllocatorResult) -> tuple[str, ...]:
    """Warnings of the allocator's simulation: retries or fragmentation."""
    if allocator.verdict == "fits":
        return ()
    helps = "; PYTORCH_ALLOC_CONF=expandable_segments:True avoids it" if allocator.expandable_segments_help else ""
    if allocator.verdict == "fits_with_retries":
        if not allocator.retries_per_step:
            return (f"the allocator frees its cache and allocates again in some steps, which takes time{helps}",)
        times = "once" if allocator.retries_per_step == 1 else f"{allocator.retries_per_step} times"
        return (
            f"the allocator frees its cache and allocates again {times} per step; the step time includes this{helps}",
        )
    return (f"fragmentation makes it exceed the GPU{helps}",) if helps else ()


def step_of(profile: Profile, tape: Tape, plan: Plan, gpu: Gpu) -> StepTime | None:
    """The time of a plan's step over the tape of a GPU; None if unknown. Ranks reach other nodes over the GPU's `inter_node` link,
    or 100 Gb/s Ethernet if it has none.
    """
    return step_time(profile, step_program(profile, tape, plan), plan, gpu, gpu.inter_node or ETHERNET_100G)


def streams_of(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[Interval, ...]:
    """Compute and communication of the plan's last micro-batch and optimizer step; empty if the time is unknown."""
    if model.profile is None:
        return ()
    tape = tape_for_search(model, plan, gpu)
    return timeline(model.profile, step_program(model.profile, tape, plan), plan, gpu, gpu.inter_node or ETHERNET_100G)


def _count_estimate(parameters: int, plan: Plan, gpu: Gpu) -> StrategyEstimate:
    states = textbook_states(parameters, plan)
    gathered = (NotModelled(f"{plan.backend} gathers the whole parameters in each step; only the verdict counts them"),)
    return StrategyEstimate(
        plan=plan,
        fits=False if states.total + states.gathered > gpu.memory_bytes else None,
        states={"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer},
        host_bytes_per_node=None if plan.offloads_to_nvme else states.host_per_node,
        lacks=(
            NotModelled(
                "a bare parameter count does not tell the sizes of activations, logits, gathered units and buckets",
                PEAKS_UNKNOWN,
                hides_needed=True,
            ),
            NotModelled("a bare parameter count has no operators to time", TIME_UNKNOWN),
            *(gathered if states.gathered else ()),
        ),
    )
