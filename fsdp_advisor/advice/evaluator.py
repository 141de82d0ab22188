"""Figures of candidate plans on one GPU type: a cheap lower bound, and the estimate that every interface shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.curves import PeakVsSize
from fsdp_advisor.engines.host import host_memory
from fsdp_advisor.engines.learned import learned
from fsdp_advisor.engines.registry import model_refusal, states_of
from fsdp_advisor.errors import AdvisorError, MissingExtra
from fsdp_advisor.gpu_support import backend_refusal
from fsdp_advisor.hardware import Gpu, usual_host_bytes
from fsdp_advisor.job.compatibility import mesh_of
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import Rows
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.step_figures import evaluation_step, runs_in, step_input, step_seconds, tensor_bytes
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tapes import search_gpu_tape
from fsdp_advisor.units import format_speed

Timer = Callable[[Resolved, Plan, Gpu], float | None]
"""Seconds of one optimizer step; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates plans of one model on one GPU type; each plan once.

    `margin` is the share of the GPU's memory that stays free. `host_unlimited`: plans may need more host memory than
    usual nodes have. `known` are rows of a report, under the same `allocator_conf` and `host_memory_bytes`.
    `timer` replaces the time model.
    """

    model: Resolved
    gpu: Gpu
    margin: float
    allocator_conf: str | None = None
    host_memory_bytes: int | None = None
    host_unlimited: bool = False
    timer: Timer | None = None
    known: Rows | None = None
    _estimates: dict[tuple[Plan, str | None], StrategyEstimate] = field(default_factory=dict, repr=False)
    _curves: dict[tuple[Plan, tuple[int, int] | None], PeakVsSize] = field(default_factory=dict, repr=False)
    _errors: dict[Plan, AdvisorError | None] = field(default_factory=dict, repr=False)

    @cached_property
    def available_bytes(self) -> int:
        """The GPU's memory less the margin."""
        return int(self.gpu.memory_bytes * (1 - self.margin))

    @cached_property
    def host_usual_bytes(self) -> int:
        return usual_host_bytes(self.gpu)

    @cached_property
    def host_limit_bytes(self) -> int | None:
        """The host memory per node that a plan's steps may need; None if there is no limit."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return None if self.host_unlimited else self.host_usual_bytes

    def on(self, gpu: Gpu) -> Evaluator:
        """The evaluator of the same model on another GPU type. Evaluators of GPUs with the same compute capability share tensor sizes."""
        return replace(self, gpu=gpu, known=None, _estimates={}, _errors={})

    def speed_text(self, tokens_per_second: float, seq_len: int) -> str:
        """A throughput in the unit of the model's task: tokens or images per second."""
        task = task_of(self.model.profile.task if self.model.profile else None)
        return format_speed(task.samples_or_tokens(tokens_per_second, seq_len), task.counted)

    # The lower bound

    def lower_bound(self, plan: Plan) -> int:
        """Bytes that the plan needs at least: tensors, CUDA and NCCL. Raises AdvisorError without a tape."""
        return self._tensors(plan)(plan.micro_batch_size) + device_overhead(self.gpu, plan).middle_bytes

    def max_micro_batch(self, plan: Plan, sizes: Sequence[int], limit_bytes: int | None = None) -> int | None:
        """The largest of the micro-batches `sizes` whose lower bound is at most the limit; None if none is.

        The limit is the memory that the margin leaves, unless another is given.
        """
        limit = self.available_bytes if limit_bytes is None else limit_bytes
        return self._tensors(plan).largest_within(sizes, limit - device_overhead(self.gpu, plan).middle_bytes)

    def host_bytes(self, plan: Plan) -> int:
        """Host memory per node that the plan's steps need, as far as it is known."""
        if plan.offloads_to_nvme:
            return 0
        if self.model.profile is None:
            return self.estimate(plan).host_bytes_per_node or 0
        return host_memory(self.model.profile, plan).steady

    def state_bytes(self, plan: Plan) -> int:
        """Bytes that stay on the GPU between steps."""
        if self.model.profile is None:
            return self.estimate(plan).kept_bytes
        return states_of(self.model.profile, plan).total.exact

    def states_exceed(self, plan: Plan) -> bool:
        """Whether the plan's states alone exceed the memory that the margin leaves. Raises AdvisorError without a tape."""
        assert self.model.profile is not None
        profile = learned(self.model.profile, search_gpu_tape(self.model, plan, self.gpu), plan)
        states = states_of(profile, plan).total.exact
        return states + device_overhead(self.gpu, plan).middle_bytes > self.available_bytes

    def recording_error(self, plan: Plan) -> AdvisorError | None:
        """Why the GPU or the engine refuses the plan, or why no tape of the plan exists; None if one does."""
        if plan not in self._errors:
            self._errors[plan] = self._recording_error(plan)
        return self._errors[plan]

    def _recording_error(self, plan: Plan) -> AdvisorError | None:
        if self.model.profile is None:
            return backend_refusal(plan, self.gpu)
        if (refused := backend_refusal(plan, self.gpu) or model_refusal(self.model.profile, plan)) is not None:
            return refused
        try:
            search_gpu_tape(self.model, plan, self.gpu)
        except AdvisorError as error:
            if isinstance(error, MissingExtra) and not self.model.is_catalogued:
                raise
            return error
        return None

    def _tensors(self, plan: Plan) -> PeakVsSize:
        """Tensor bytes over the micro-batch. They are equal for all accumulations of two or more."""
        steps = min(plan.gradient_accumulation_steps, 2)
        alone = replace(plan, micro_batch_size=1, gradient_accumulation_steps=steps)
        key = alone, self.gpu.compute_capability  # it decides the attention kernel
        if key not in self._curves:
            self._curves[key] = PeakVsSize(
                lambda size: tensor_bytes(self.model, replace(alone, micro_batch_size=size), self.gpu)
            )
        return self._curves[key]

    # The whole estimate

    def estimate(self, plan: Plan, allocator_conf: str | None = None) -> StrategyEstimate:
        """The plan's row of a report, under the request's allocator settings or the given ones."""
        text = allocator_conf or self.allocator_conf
        if self.known is not None and text == self.allocator_conf and plan in self.known.plans:
            return self.known.of_plan(plan)
        key = (plan, text)
        if key not in self._estimates:
            self._estimates[key] = estimate_plan(
                self.model,
                plan,
                self.gpu,
                conf=AllocatorConf.parse(text),
                host_memory_bytes=self.host_memory_bytes,
                searched=True,
            )
        return self._estimates[key]

    def candidate(self, plan: Plan) -> Candidate:
        """The plan with its estimate. The estimate assumes expandable segments if the plan fits only with them, or if each step has
        allocator retries without them.
        """
        found = self._within_margin(self.estimate(plan), self.allocator_conf)
        helps = self._retries_without_need(found) if found.fits else self._fragmentation_decides(found)
        if not helps:
            return found
        expandable = self._within_margin(self.estimate(plan, EXPANDABLE_SEGMENTS), EXPANDABLE_SEGMENTS)
        return expandable if expandable.fits else found

    def _within_margin(self, row: StrategyEstimate, allocator_conf: str | None) -> Candidate:
        """A row as a candidate, with `runs_in_available` filled: whether the row needs the margin only for the allocator's cache."""
        found = self._candidate(row, allocator_conf)
        needs_margin = found.fits is False and self._runs_in_available(found)
        return replace(found, runs_in_available=True) if needs_margin else found

    def seconds(self, plan: Plan) -> float | None:
        """Seconds of a step without allocator retries; None if unknown."""
        return (self.timer or step_seconds)(self.model, plan, self.gpu)

    def numerics_gain(self, plan: Plan) -> float:
        """The factor by which a plan under autocast would be faster in the numerics of FSDP and DeepSpeed; 1 for other plans.

        FSDP and DeepSpeed compute everything in 16 bits, from fp32 masters. Autocast keeps norms, softmax and the loss in fp32, and
        casts the fp32 weights in each forward. The factor is the ratio of the two step times on one GPU, which has no communication.
        """
        if plan.strategy != "ddp" or plan.precision not in ("bf16-mixed", "fp16-mixed"):
            return 1.0
        alone = replace(plan, mesh=mesh_of("ddp", 1, 1))
        sharded = replace(alone, strategy="zero2", backend="fsdp2", mesh=mesh_of("zero2", 1, 1))
        try:
            own, throughout = self.seconds(alone), self.seconds(sharded)
        except AdvisorError:  # not recorded
            return 1.0
        return max(own / throughout, 1.0) if own and throughout else 1.0

    def _candidate(self, row: StrategyEstimate, allocator_conf: str | None) -> Candidate:
        if self.timer is not None:
            seconds = self.timer(self.model, row.plan, self.gpu)
        else:
            seconds = None if row.step is None else row.step.seconds
        return Candidate(
            estimate=row,
            gpu=self.gpu.name,
            available_bytes=self.available_bytes,
            allocator_conf=allocator_conf,
            host_available_bytes=self.host_memory_bytes,
            host_usual_bytes=self.host_usual_bytes,
            host_unlimited=self.host_unlimited,
            step_seconds=seconds,
            numerics_gain=self.numerics_gain(row.plan) if seconds else 1.0,
        )

    def _runs_in_available(self, found: Candidate) -> bool:
        """Whether a plan that fits the GPU also completes in the memory that the margin leaves, with a smaller cache."""
        row, model, gpu = found.estimate, self.model, self.gpu
        if not row.fits or row.allocator is None or found.host_fits is False:
            return False
        step = step_input(model, search_gpu_tape(model, row.plan, gpu), row.plan, gpu)
        conf = AllocatorConf.parse(found.allocator_conf)
        return runs_in(step, evaluation_step(model, row.plan, gpu), row, self.available_bytes, conf)

    @property
    def _may_set_allocator(self) -> bool:
        """Whether the GPU has PyTorch's caching allocator and the request leaves its settings open."""
        return self.allocator_conf is None and self.gpu.uses_torch_cuda

    def _retries_without_need(self, found: Candidate) -> bool:
        """Whether every step retries allocations, expandable segments end that, and the setting is open."""
        allocator = found.estimate.allocator
        if not self._may_set_allocator or allocator is None or not allocator.retries_per_step:
            return False
        return allocator.expandable_segments_help is True

    def _fragmentation_decides(self, found: Candidate) -> bool:
        """Whether the plan would fit without fragmentation, and other allocator settings may be tried."""
        needed = found.estimate.needed_breakdown
        allocator = found.estimate.allocator
        if not self._may_set_allocator or needed is None or allocator is None or found.host_fits is False:
            return False
        if allocator.expandable_segments_help is False and not found.estimate.fits:
            return False  # the answer is about the whole GPU, not about the memory that the margin leaves
        return found.known_bytes - needed["fragmentation"] <= self.available_bytes
