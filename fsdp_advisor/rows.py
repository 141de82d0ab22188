"""The estimate of one plan, which is a row of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.host import gather_warnings
from fsdp_advisor.engines.fsdp2.units import unit_warnings
from fsdp_advisor.engines.host import host_memory
from fsdp_advisor.engines.job_peaks import JobPeaks, Limits, StepPeaks, job_peaks
from fsdp_advisor.engines.learned import gradient_warnings, learned
from fsdp_advisor.engines.loading import one_copy_bytes
from fsdp_advisor.engines.model_outputs import searches_unused
from fsdp_advisor.engines.reference import copy_warnings, gathered_bytes
from fsdp_advisor.engines.registry import not_modelled, states_of
from fsdp_advisor.engines.rollouts import batch_warnings
from fsdp_advisor.engines.textbook import backend_states, textbook_states, whole_parameter_bytes
from fsdp_advisor.engines.transfer import LoadMethod
from fsdp_advisor.engines.units_summary import (
    dtype_warnings,
    packed_warnings,
    saving_warnings,
    units_text,
    wrap_warnings,
)
from fsdp_advisor.errors import AdvisorError, MissingExtra, NotRecordable, UsageError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import DEFAULT_CONF, AllocatorConf, AllocatorResult
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.model.kernels import missing_packages
from fsdp_advisor.model.lora_kernels import kernels_of_model
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.program.storages import States
from fsdp_advisor.step_figures import (
    StepInput,
    allocator_result,
    evaluation_bytes,
    evaluation_step,
    peak_bytes_of_step,
    peak_of_step,
    runs_in,
    step_input,
    time_of_step,
    timeline_of_step,
)
from fsdp_advisor.strategy_estimate import NotModelled, StrategyEstimate
from fsdp_advisor.tape_keys import gpu_tape_key_of, tape_key_of
from fsdp_advisor.tapes import (
    SelectedTape,
    cpu_tape,
    kept_gpu_tape,
    row_tape,
    search_row_tape,
    takes_long_on_cpu,
)
from fsdp_advisor.timing import StepTime, why_unknown
from fsdp_advisor.units import format_gib

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


class _Verdict(NamedTuple):
    """Whether a job fits a GPU, the bytes that it needs, and those that are left; None where unknown."""

    fits: bool | None
    needed_bytes: int | None
    headroom_bytes: int | None


def estimate_plan(
    model: Resolved,
    plan: Plan,
    gpu: Gpu,
    *,
    explain: bool = False,
    conf: AllocatorConf = DEFAULT_CONF,
    host_memory_bytes: int | None = None,
    searched: bool = False,
) -> StrategyEstimate:
    """One row of a report. `conf`: the allocator's settings. `host_memory_bytes`: memory of one node's host, None if
    unlimited. `searched`: it is a plan of a search, for which no step on a CPU is recorded.
    """
    if model.profile is None:
        if plan.task != "sft":
            raise UsageError(
                f"{model.name} is a bare parameter count, which has no task {plan.task}", hint="name a model"
            )
        return _count_estimate(model.parameters, plan, gpu)
    limits = Limits(gpu=gpu, overhead=device_overhead(gpu, plan), host_memory_bytes=host_memory_bytes)
    try:
        selected = (search_row_tape if searched else row_tape)(model, plan, gpu)
    except AdvisorError as error:
        if isinstance(error, MissingExtra) and not model.is_catalogued:
            raise  # without torch no strategy has a tape; a catalog model may have the tapes of other strategies
        base, _ = _base_row(model.profile, None, plan, limits, StepPeaks())
        figures = PEAKS_UNKNOWN if why_unknown(plan, gpu) else f"{PEAKS_UNKNOWN}, {TIME_UNKNOWN}"
        hint = f"; {error.hint}" if isinstance(error, MissingExtra | NotRecordable) else ""
        unknown = NotModelled(f"{error.message}{hint}", figures, hides_needed=True)
        return replace(base, omissions=(unknown, *base.omissions))
    step = step_input(model, kept_gpu_tape(model.profile, selected, plan, gpu), plan, gpu)
    row = _with_step(model, selected, step, conf, limits, searched=searched)
    if not searched and (missing := missing_packages(model.profile, plan.kernel_packages)):
        kernels = replace(plan, kernel_packages="all")
        faster = estimate_plan(model, kernels, gpu, conf=conf, host_memory_bytes=host_memory_bytes, searched=True)
        row = replace(row, warnings=row.warnings + _missing_warnings(missing, row, faster))
    if not explain:
        return row
    return replace(row, fused_loss_peak_bytes=peak_bytes_of_step(step.profile, step.tape, plan, fused_loss=True))


def _simulated_peak_bytes(model: Resolved, selected: SelectedTape, plan: Plan, gpu: Gpu, searched: bool) -> int | None:
    """The peak of PyTorch's own code on a CPU. None if the selected tape is a GPU's and the CPU's step cannot be recorded, takes too long
    to record, or is that of a plan of a search.
    """
    assert model.profile is not None
    key, tape = selected
    if key.device == "gpu" and plan.attention != "flash_attention_2":
        if searched or takes_long_on_cpu(model.profile, plan):
            return None
        try:
            _, tape = cpu_tape(model, plan, gpu)
        except AdvisorError:
            return None
    return peak_bytes_of_step(model.profile, tape, plan)


def _base_row(
    profile: Profile, tape: Tape | None, plan: Plan, limits: Limits, steps: StepPeaks
) -> tuple[StrategyEstimate, JobPeaks]:
    """A row's states, host memory, phases and notes, without the allocator's figures and the time of its step; and its phases. `tape`: None
    for a plan without one.

    `fits` is False if these parts alone need too much memory, else None (not yet known).
    """
    gpu, overhead = limits.gpu, limits.overhead
    if tape is not None:
        profile = learned(profile, tape, plan)
    states = states_of(profile, plan)
    host = None if plan.offloads_to_nvme else host_memory(profile, plan, tape).steady
    omissions = list(map(NotModelled, not_modelled(profile, plan)))
    if (why := why_unknown(plan, gpu)) is not None:
        omissions.append(NotModelled(why, TIME_UNKNOWN))
    copy = one_copy_bytes(profile, plan)
    job = job_peaks(profile, plan, limits, steps, states=states, host=host)
    row = StrategyEstimate(
        plan=plan,
        fits=False if states.total.rounded + overhead.middle_bytes > gpu.memory_bytes or job.fails else None,
        states={name: storages.exact for name, storages in states.on_gpu.items()},
        parameter_parts=_parameter_parts(profile, plan, states),
        paged_optimizer_bytes=states.paged.exact,
        host_bytes_per_node=host,
        host_loading_bytes_per_node={"one_copy": copy, "every_rank": copy * plan.ranks_per_node},
        overhead=overhead,
        job_peaks=job,
        units=units_text(profile, plan) if plan.wrap != "layer" else None,
        whole_reference_bytes=gathered_bytes(profile, plan),
        lora_kernels=kernels_of_model(plan, profile.config, profile.parameter_names()),
        warnings=(
            *(unit_warnings(profile, plan) if plan.backend == "fsdp2" else ()),
            *dtype_warnings(profile, plan),
            *packed_warnings(profile, plan),
            *saving_warnings(profile, plan),
            *gather_warnings(profile, plan),
            *wrap_warnings(profile, plan),
            *((job.vllm.text,) if job.vllm is not None and job.vllm.missing_bytes else ()),
            *copy_warnings(profile, plan),
        ),
        omissions=tuple(omissions),
    )
    return row, job


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
    conf: AllocatorConf,
    limits: Limits,
    *,
    searched: bool,
) -> StrategyEstimate:
    """The whole row of a plan: `_base_row`, tensors, allocator, verdict and time. `selected`: the tape of the plan's code path and its
    key; `step` has the same tape with the kernels of the GPU. `searched`: it is a plan of a search, for which no step
    on a CPU is recorded.
    """
    profile, on_gpu, plan, gpu = step.profile, step.tape, step.plan, step.gpu
    key = selected.key
    tensors = peak_of_step(profile, on_gpu, plan)
    evaluation, unknown = _evaluation(model, plan, gpu)
    evaluated = None if evaluation is None else evaluation_bytes(step, evaluation)
    peaks = StepPeaks(steady=tensors, first=step.first_peak, evaluation_bytes=evaluated)
    base, job = _base_row(profile, on_gpu, plan, limits, peaks)
    allocator = _simulated(step, None, conf, limits, job.load_method)
    evaluating = None if evaluation is None else _simulated(step, evaluation, conf, limits, job.load_method)
    verdict = _verdict(
        limits,
        conf,
        job,
        max(result.reserved_peak_bytes for result in (allocator, evaluating) if result is not None),
        evaluation_unknown=unknown != (),
        host_unknown=limits.host_memory_bytes is not None and base.host_bytes_per_node is None,
    )
    time = _job_time(step, base, allocator)
    warnings = base.warnings + gradient_warnings(profile, on_gpu, plan) + batch_warnings(plan)
    if key.attention != plan.attention:
        warnings += (f"the model has no {plan.attention} attention; {key.attention} is used",)
    row = replace(
        base,
        **verdict._asdict(),
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
        omissions=(
            *unknown,
            *base.omissions,
            *_missing_in_tape(profile, plan, key, gpu_tape_key_of(profile, key, plan, gpu)),
        ),
        simulate_peak=partial(_simulated_peak_bytes, model, selected, plan, gpu, searched),
        replay_timeline=partial(timeline_of_step, profile, on_gpu, plan),
    )
    return row if searched else replace(row, warnings=row.warnings + _overhead_warnings(step, evaluation, row, conf))


def _overhead_warnings(
    step: StepInput, evaluation: StepInput | None, row: StrategyEstimate, conf: AllocatorConf
) -> tuple[str, ...]:
    """A warning of a job that fits only if CUDA and NCCL need less than their high estimate."""
    if not row.fits or row.headroom_bytes is None or row.overhead is None:
        return ()
    more = row.overhead.high_bytes - row.overhead.middle_bytes
    if row.headroom_bytes >= more or runs_in(step, evaluation, row, step.gpu.memory_bytes - more, conf):
        return ()
    low, high = format_gib(row.overhead.low_bytes), format_gib(row.overhead.high_bytes)
    return (f"it may not fit: CUDA and NCCL need {low} to {high}, and with the most the job runs out of memory",)


def _simulated(
    step: StepInput, evaluation: StepInput | None, conf: AllocatorConf, limits: Limits, loading: LoadMethod
) -> AllocatorResult:
    """The allocator's result, and whether expandable segments help a job that does not fit or retries because of fragmentation alone."""
    gpu, overhead = limits.gpu, limits.overhead
    simulate = partial(allocator_result, step, evaluation=evaluation, overhead=overhead, loading=loading)
    found = simulate(conf=conf)
    tensors_fit = found.allocated_peak_bytes <= gpu.memory_bytes - overhead.middle_bytes
    if found.verdict == "fits" or not tensors_fit or conf.expandable_segments or not gpu.uses_torch_cuda:
        return found
    return found.compared_with(simulate(conf=replace(conf, expandable_segments=True)))


def _verdict(
    limits: Limits,
    conf: AllocatorConf,
    job: JobPeaks,
    reserved_bytes: int,
    *,
    evaluation_unknown: bool,
    host_unknown: bool,
) -> _Verdict:
    """The verdict on a job whose steps reserve `reserved_bytes`."""
    gpu, overhead = limits.gpu, limits.overhead
    needed = overhead.middle_bytes + max(reserved_bytes, job.bytes_outside_steps)
    available = min(gpu.memory_bytes, overhead.middle_bytes + conf.allowed_bytes(gpu.memory_bytes))
    fits = needed <= available and job.fails is None
    if fits and evaluation_unknown:  # what does not fit without evaluation does not fit with it
        return _Verdict(None, None, None)
    return _Verdict(None if fits and host_unknown else fits, needed, available - needed)


def _evaluation(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[StepInput | None, tuple[NotModelled, ...]]:
    """The input of the evaluation between two steps, None if there is none or it has no tape; and the note that it has no tape."""
    try:
        return evaluation_step(model, plan, gpu), ()
    except AdvisorError as error:
        reason = f"the peak of evaluation, and whether the job fits: {error.message}"
        return None, (NotModelled(reason, hides_needed=True),)


def _job_time(step: StepInput, base: StrategyEstimate, allocator: AllocatorResult) -> StepTime | None:
    """The time of a step with the allocator's retries and the paging of optimizer state; None if unknown."""
    time, gpu = time_of_step(step), step.gpu
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


def _missing_warnings(missing: Sequence[str], row: StrategyEstimate, faster: StrategyEstimate) -> tuple[str, ...]:
    """A warning of what a row needs more than the same row with the `missing` packages installed, as far as both are known."""
    costs = []
    if row.needed_bytes is not None and faster.needed_bytes is not None:
        more = row.needed_bytes - faster.needed_bytes
        costs.append(f"{format_gib(abs(more))} {'more' if more >= 0 else 'less'}")
    if row.step_seconds is not None and faster.step_seconds is not None:
        costs.append(f"{row.step_seconds / faster.step_seconds:.1f} times the time")
    return (f"without {' and '.join(missing)} it needs {' and '.join(costs)}",) if costs else ()


def _allocator_warnings(allocator: AllocatorResult) -> tuple[str, ...]:
    """Warnings of the allocator's simulation: retries or fragmentation."""
    if allocator.verdict == "fits":
        return ()
    helps = f"; PYTORCH_ALLOC_CONF={EXPANDABLE_SEGMENTS} avoids it" if allocator.expandable_segments_help else ""
    if allocator.verdict == "fits_with_retries":
        if not allocator.retries_per_step:
            return (f"the allocator frees its cache and allocates again in some steps, which takes time{helps}",)
        times = "once" if allocator.retries_per_step == 1 else f"{allocator.retries_per_step} times"
        return (
            f"the allocator frees its cache and allocates again {times} per step; the step time includes this{helps}",
        )
    return (f"fragmentation makes it exceed the GPU{helps}",) if helps else ()


def _count_estimate(parameters: int, plan: Plan, gpu: Gpu) -> StrategyEstimate:
    textbook, kept = textbook_states(parameters, plan), backend_states(parameters, plan)
    whole = whole_parameter_bytes(parameters, plan)
    gathered = NotModelled(f"{plan.backend} gathers the whole parameters in each step; only the verdict counts them")
    on_host = NotModelled("gradients and pinned buffers on the host are left out")
    return StrategyEstimate(
        plan=plan,
        fits=False if kept.on_gpu + whole > gpu.memory_bytes else None,
        states={"parameters": textbook.parameters, "gradients": textbook.gradients, "optimizer": textbook.optimizer},
        backend_keeps_bytes=kept.on_gpu,
        host_bytes_per_node=None if plan.offloads_to_nvme else kept.host_per_node,
        omissions=(
            NotModelled(
                "a bare parameter count does not tell the sizes of activations, logits, gathered units and buckets",
                PEAKS_UNKNOWN,
                hides_needed=True,
            ),
            NotModelled("a bare parameter count has no operators to time", TIME_UNKNOWN),
            *((gathered,) if whole else ()),
            *((on_host,) if plan.offload != "none" else ()),
        ),
    )
