"""Figures of a plan's step: its peak, the allocator's result and its time, read from the step's program.

An estimate's row gives the tape; for a search, `tapes.search_gpu_tape` selects it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from fsdp_advisor.engines.evaluation import kept_logits
from fsdp_advisor.engines.job_peaks import bytes_between_steps
from fsdp_advisor.engines.learned import learned
from fsdp_advisor.engines.registry import states_of, step_program
from fsdp_advisor.engines.transfer import LoadMethod
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.links import ETHERNET_100G, Link
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import (
    AllocatorConf,
    AllocatorResult,
    StepOperations,
    completes,
    simulate_allocator,
    step_operations,
    with_evaluation,
    with_first_step,
    with_graph,
)
from fsdp_advisor.memory.device import DeviceOverhead
from fsdp_advisor.memory.libraries import cublas_workspace_bytes
from fsdp_advisor.memory.live import StepPeak, TimelinePoint, peak_bytes, step_peak, step_timeline
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.program.instructions import StepProgram
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tapes import kept_gpu_tape, records_each_batch, row_tape, search_gpu_tape
from fsdp_advisor.timing import Interval, StepTime, step_time, timeline

remembered = lru_cache(maxsize=1024)
"""A cache for the functions that take most of a row's time. A search, its explanation and a changed request estimate the same plans
again.
"""


class StepInput(NamedTuple):
    """What a step is computed from. `tape`: with the kernels of the GPU. `first_tape`: of the first step, if it runs other code."""

    profile: Profile
    tape: Tape
    plan: Plan
    gpu: Gpu
    first_tape: Tape | None = None

    @property
    def program(self) -> StepProgram:
        return step_program(self.profile, self.tape, self.plan)

    @property
    def first_peak(self) -> StepPeak | None:
        """The peak of the first step; None if it runs the same code as later steps."""
        return None if self.first_tape is None else peak_of_step(self.profile, self.first_tape, self.plan)

    @property
    def inter_node(self) -> Link:
        """The link over which ranks reach other nodes: the GPU's, or 100 Gb/s Ethernet if it has none."""
        return self.gpu.inter_node or ETHERNET_100G


def step_input(model: Resolved, tape: Tape, plan: Plan, gpu: Gpu) -> StepInput:
    """The input of a step over `tape`. The model is not a bare parameter count.

    PEFT converts an adapter's input to the dtype of its weight. Without `use_orig_params` this is the shard's dtype only in the first step,
    as with it in every step; later it is that of the weight that was gathered last.
    Source: torch 2.13, fsdp/_flat_param.py, `_use_unsharded_views`; peft 0.21, tuners/tuners_utils.py, `_cast_input_dtype`.
    """
    assert model.profile is not None
    first_tape = None
    if plan.steps_flat_parameters and plan.mixed and model.profile.adapter_parameters:
        with suppress(AdvisorError):
            first_tape = search_gpu_tape(model, replace(plan, use_orig_params=True), gpu)
    return StepInput(model.profile, tape, plan, gpu, first_tape)


# Of a tape


def peak_of_step(profile: Profile, tape: Tape, plan: Plan) -> StepPeak:
    """The peak of a plan's step over a tape."""
    return step_peak(step_program(profile, tape, plan), *plan.tape_shape)


@remembered
def peak_bytes_of_step(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False) -> int:
    """The peak alone. `fused_loss`: as if the loss allocated nothing."""
    return peak_bytes(step_program(profile, tape, plan), *plan.tape_shape, fused_loss=fused_loss)


def timeline_of_step(profile: Profile, tape: Tape, plan: Plan) -> tuple[TimelinePoint, ...]:
    """Live memory through a plan's step over a tape."""
    return step_timeline(step_program(profile, tape, plan), *plan.tape_shape)


def time_of_step(step: StepInput) -> StepTime | None:
    """The time of a step, without allocator retries; None if unknown."""
    return step_time(step.profile, step.program, step.plan, step.gpu, step.inter_node)


@remembered
def allocator_result(
    step: StepInput,
    *,
    evaluation: StepInput | None = None,
    conf: AllocatorConf,
    overhead: DeviceOverhead,
    workspace_bytes: int | None = None,
    loading: LoadMethod | None = None,
) -> AllocatorResult:
    """The result of the caching allocator for several steps, in the GPU memory that CUDA and NCCL (`overhead`) leave.

    `evaluation`: the input of an evaluation between two steps. `workspace_bytes`: of cuBLAS; by default those of the GPU.
    """
    return simulate_allocator(
        _operations(step, evaluation, loading, workspace_bytes),
        conf=conf,
        limit_bytes=step.gpu.memory_bytes - overhead.middle_bytes,
        device_bytes=step.gpu.memory_bytes,
    )


@remembered
def _completes(
    step: StepInput,
    evaluation: StepInput | None,
    loading: LoadMethod,
    conf: AllocatorConf,
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

    def over(tape: Tape) -> StepOperations:
        return step_operations(
            step_program(step.profile, tape, plan),
            *plan.tape_shape,
            resident_threads=gpu.resident_threads,
            workspace_bytes=[workspace] * plan.facts.threads,
            loaded=loading.transfers if loading else (),
        )

    operations = over(step.tape)
    if step.first_tape is not None:
        operations = with_first_step(operations, over(step.first_tape))
    if plan.captures_graph:
        operations = with_graph(operations)
    if evaluation is None:
        return operations
    kept = kept_logits(step.profile, plan)
    return with_evaluation(operations, _operations(evaluation, None, None), before=kept.before, after=kept.after)


# Of an evaluation between two steps


def evaluation_step(model: Resolved, plan: Plan, gpu: Gpu) -> StepInput | None:
    """The input of the Trainer's evaluation; None if the job has none. Raises AdvisorError if there is no tape."""
    own, profile = plan.evaluation_plan, model.profile
    if own is None or profile is None:
        return None
    return StepInput(profile, kept_gpu_tape(profile, row_tape(model, own, gpu), own, gpu), own, gpu)


def evaluation_bytes(step: StepInput, evaluation: StepInput) -> int:
    """Peak tensor bytes of the evaluation between two steps."""
    profile, tape, own = evaluation.profile, evaluation.tape, evaluation.plan
    peak = peak_of_step(profile, tape, own)
    left = timeline_of_step(profile, tape, own)[-1].live_bytes
    # the evaluation's program has no gradients and optimizer states, which stay on the GPU
    kept = bytes_between_steps(step.plan, states_of(learned(profile, step.tape, step.plan), step.plan))
    of_training = kept - bytes_between_steps(own, states_of(learned(profile, tape, own), own))
    return of_training + kept_logits(profile, step.plan).peak(forward=peak.peak, left=left)


# Of a plan, for a search


def tensor_bytes(model: Resolved, plan: Plan, gpu: Gpu) -> int:
    """Peak tensor bytes of a plan's step, a lower bound of its memory. Raises AdvisorError if there is no tape.

    If every micro-batch needs a recording of its own, only micro-batches 2 and 3 are recorded, because larger ones take longer. The peak of
    each visit is extrapolated on the line through its values at 2 and 3, and the result is the highest. It is a lower bound, except for the
    rounding of storages: such a peak is a maximum of straight lines, so it never grows more slowly later.
    """
    if _is_recorded_small(model, plan, gpu):
        two, three = (timeline_of_step(step.profile, step.tape, step.plan) for step in _small_steps(model, plan, gpu))
        return max(
            _on_line(few.high_bytes, more.high_bytes, plan.micro_batch_size)
            for few, more in zip(two, three, strict=True)
        )
    step = _searched_step(model, plan, gpu)
    return peak_bytes_of_step(step.profile, step.tape, plan)


def _is_recorded_small(model: Resolved, plan: Plan, gpu: Gpu) -> bool:
    """Whether a search reads the plan's figures from micro-batches 2 and 3, because every micro-batch needs a recording of its own."""
    return plan.micro_batch_size > 3 and records_each_batch(model, plan, gpu)


def _small_steps(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[StepInput, StepInput]:
    """The plan's steps with micro-batches of 2 and 3."""
    two, three = (_searched_step(model, replace(plan, micro_batch_size=size), gpu) for size in (2, 3))
    return two, three


Number = TypeVar("Number", int, float)


def _on_line(two: Number, three: Number, size: int) -> Number:
    """The value at `size` on the line through the values at 2 and 3."""
    return three + (size - 3) * (three - two)


def logits_bytes_at_peak(model: Resolved, plan: Plan, gpu: Gpu) -> int:
    """Bytes by which the peak of a plan's step falls if the loss allocates nothing: the most that a loss without logits can save."""
    step = _searched_step(model, plan, gpu)
    fused = peak_bytes_of_step(step.profile, step.tape, plan, fused_loss=True)
    return peak_bytes_of_step(step.profile, step.tape, plan) - fused


def step_seconds(model: Resolved, plan: Plan, gpu: Gpu) -> float | None:
    """Seconds of a plan's step, without allocator retries; None if unknown.

    If every micro-batch needs a recording of its own, the seconds of each part of the step are extrapolated from micro-batches 2 and 3.
    They are at least 0, because the time that the GPU waits shrinks while its work grows.
    """
    if model.profile is None:
        return None
    if _is_recorded_small(model, plan, gpu):
        two, three = map(time_of_step, _small_steps(model, plan, gpu))
        if two is None or three is None:
            return None
        size, at_two = plan.micro_batch_size, two.breakdown
        return sum(max(0.0, _on_line(at_two[part], seconds, size)) for part, seconds in three.breakdown.items())
    time = time_of_step(_searched_step(model, plan, gpu))
    return None if time is None else time.seconds


def streams_of(model: Resolved, plan: Plan, gpu: Gpu) -> tuple[Interval, ...]:
    """Compute and communication of the plan's last micro-batch and optimizer step; empty if the time is unknown."""
    if model.profile is None:
        return ()
    step = _searched_step(model, plan, gpu)
    return timeline(step.profile, step.program, plan, gpu, step.inter_node)


def runs_in(
    step: StepInput, evaluation: StepInput | None, row: StrategyEstimate, memory_bytes: int, conf: AllocatorConf
) -> bool:
    """Whether the job of `row` would complete on a GPU with only `memory_bytes`: each phase fits, and the allocator completes the steps.

    `step` and `evaluation`: the inputs of the row's training step and of its evaluation, if it has one.
    """
    overhead, allocator, job = row.overhead, row.allocator, row.job_peaks
    if overhead is None or allocator is None or job is None:
        return False
    left = memory_bytes - overhead.middle_bytes
    if max(allocator.allocated_peak_bytes, job.bytes_outside_steps) > left:
        return False
    return _completes(step, evaluation, job.load_method, conf, limit_bytes=left, device_bytes=memory_bytes)


def _searched_step(model: Resolved, plan: Plan, gpu: Gpu) -> StepInput:
    """The step of a plan of a search. Raises AdvisorError if there is no tape. The model is not a bare parameter count.

    The tape of the first step is left out: a search compares steady steps, and `runs_in`, which asks whether a job completes, takes it from
    `step_input`.
    """
    assert model.profile is not None
    return StepInput(model.profile, search_gpu_tape(model, plan, gpu), plan, gpu)
