"""The time of one optimizer step on one rank, with its breakdown by cause and its range of uncertainty."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, inf

from fsdp_advisor.hardware import Gpu, Link
from fsdp_advisor.job.compilation import leaves_layers_uncompiled
from fsdp_advisor.job.fp8 import converts_head
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.training_task import sequences_per_example
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import GENERATION_PHASES, Tiled
from fsdp_advisor.model.tape_key import repeats_each_forward
from fsdp_advisor.policies.dtypes import compute_bytes, stored_bytes
from fsdp_advisor.program.instructions import MicroBatch, StepProgram
from fsdp_advisor.timing.achieved import RETRY_S, STOLEN_BY_NCCL, host_bytes_per_s
from fsdp_advisor.timing.caveats import Caveat, caveats_of
from fsdp_advisor.timing.operators import Device, device_of
from fsdp_advisor.timing.timeline import (
    Interval,
    MicroBatchTime,
    micro_batch_time,
    optimizer_time,
    rates_of,
    step_intervals,
)
from fsdp_advisor.timing.work import COMPUTE_CLASSES, SegmentTime, TapeWork, WorkOptions, tape_work

UNCERTAINTY: dict[str, float] = {
    "matmul": 0.15, "attention": 0.25, "pointwise": 0.25, "loss": 0.25, "recomputation": 0.15, "launch": 0.50,
    "sharding": 0.25, "communication": 0.50, "contention": 1.0, "optimizer": 0.25, "host": 0.50, "allocator": 1.0,
}  # fmt: skip
"""The share by which each part of a step may be faster than estimated. It may be slower by SLOWER times that share."""
SLOWER = 2.0
"""Runs are slower than estimated more often than faster: memory is nearly full, kernels are older, the network is busy. 73 of 76
published runs (all parts together) lie in the resulting range.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of `tokens` tokens on one GPU. `breakdown` is seconds by cause and sums to the step.

    `matmul`, `attention`, `pointwise`, `loss`: compute on the GPU by class of operator; `recomputation`: the forwards that activation
    checkpointing repeats; `launch`: the GPU waits for the CPU to launch kernels; `sharding`: copies into and out of communication buffers,
    and sums of gradients; `communication`: exposed collectives; `contention`: the slowdown of compute by hidden collectives; `optimizer`:
    its step on the GPU; `host`: PCIe and the optimizer on the host; `allocator`: retries of the caching allocator.
    `communication_seconds`: all collectives, also those hidden behind compute; only tests read it.
    """

    breakdown: dict[str, float]
    tokens: float
    model_flops: float
    peak_flops: float
    communication_seconds: float
    low_seconds: float
    high_seconds: float
    caveats: tuple[Caveat, ...] = ()

    def with_retries(self, retries: int) -> StepTime:
        """The step with the time of `retries` allocator retries added."""
        return self._with("allocator", retries * RETRY_S) if retries else self

    def with_paging(self, paged_bytes: int, left_bytes: int, gpu: Gpu) -> StepTime:
        """The step with the traffic of `paged_bytes` of optimizer state in managed memory added.

        Nothing moves if they fit into `left_bytes`, the GPU's memory that CUDA, NCCL and PyTorch do not use. If not, all of them move to
        the GPU and back: CUDA evicts the pages that came first, and each step uses them in the same order.
        """
        moves = paged_bytes > max(0, left_bytes)
        return self._with("host", 2 * paged_bytes / host_bytes_per_s(gpu)) if moves else self

    def _with(self, part: str, seconds: float) -> StepTime:
        """The step with more `seconds` of a part, and their uncertainty."""
        unsure = seconds * UNCERTAINTY[part]
        return replace(
            self,
            breakdown=self.breakdown | {part: self.breakdown[part] + seconds},
            low_seconds=self.low_seconds + seconds - unsure,
            high_seconds=self.high_seconds + seconds + SLOWER * unsure,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of the step's caveats."""
        return tuple(f"step time: {caveat.text}" for caveat in self.caveats)

    @property
    def seconds(self) -> float:
        return sum(self.breakdown.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's own FLOPs per second, without recomputation, over the datasheet's rate.

        Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B: attention counts in full, also under a causal mask.
        """
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """The lowest and the highest tokens per second per GPU."""
        return self.tokens / self.high_seconds, self.tokens / self.low_seconds

    @property
    def mfu_range(self) -> tuple[float, float]:
        work = self.model_flops / self.peak_flops
        return work / self.high_seconds, work / self.low_seconds

    @property
    def exposed_communication_share_range(self) -> tuple[float, float]:
        """The range of the share when only the exposed communication time is uncertain."""
        exposed, unsure = self.breakdown["communication"], UNCERTAINTY["communication"]
        rest = self.seconds - exposed
        least, most = exposed * (1 - unsure), exposed * (1 + SLOWER * unsure)
        return least / (rest + least), most / (rest + most)

    @property
    def seconds_without_communication(self) -> float:
        """Seconds of the step if collectives take no time, as when a single GPU stands in for one of many ranks."""
        return self.seconds - self.breakdown["communication"] - self.breakdown["contention"]

    @property
    def exposed_communication_share(self) -> float:
        """The share of the step that is exposed communication."""
        return self.breakdown["communication"] / self.seconds


def _device(plan: Plan, gpu: Gpu) -> Device | None:
    """The rates of the GPU at the plan's precision and attention; None if they are unknown."""
    return device_of(
        gpu, plan.precision, plan.attention, compiled=plan.compile != "none" and not leaves_layers_uncompiled(plan)
    )


def why_unknown(plan: Plan, gpu: Gpu) -> str | None:
    """The reason why there is no step time; None if there is one."""
    if _device(plan, gpu) is None:
        if gpu.is_memory_size:
            return f"{gpu.name} is known only by its memory: name a GPU for the time of a step"
        return f"the rates that {gpu.name} achieves are not known"
    if plan.offloads_to_nvme:
        return "the rate of the NVMe drives is not known"
    return None


def step_time(profile: Profile, program: StepProgram, plan: Plan, gpu: Gpu, between: Link) -> StepTime | None:
    """The time of a step of `plan` on GPUs that reach other nodes over `between`; None if `why_unknown` returns a reason.

    `program` is the step over the tape that the GPU runs.
    """
    device = _device(plan, gpu)
    if device is None or why_unknown(plan, gpu) is not None:
        return None
    rates, work = rates_of(plan, gpu, between, device), work_of(profile, program, plan, device, gpu)
    breakdown: dict[str, float] = dict.fromkeys(UNCERTAINTY, 0.0)
    sent = 0.0
    for micro_batch in program.micro_batches:
        time = micro_batch_time(micro_batch, rates, work.by_segment)
        for name, seconds in _micro_batch_parts(micro_batch, time, work.by_segment).items():
            breakdown[name] += micro_batch.times * seconds
        sent += micro_batch.times * (time.sent + time.late)
    optimizer = optimizer_time(program, rates)
    breakdown["communication"] += optimizer.gather
    breakdown["optimizer"] += optimizer.update
    breakdown["host"] += optimizer.host_update + optimizer.host_transfer
    seconds = sum(breakdown.values())
    caveats = caveats_of(profile, plan, gpu, breakdown, seconds)
    unsure = sum(value * UNCERTAINTY[name] for name, value in breakdown.items())
    unsure += seconds * sum(caveat.extra_uncertainty for caveat in caveats)
    micro_batches = plan.gradient_accumulation_steps
    scorings = 1 if plan.generates_once else micro_batches
    return StepTime(
        breakdown=breakdown,
        tokens=plan.tokens_per_step,
        model_flops=work.trained_flops * micro_batches + work.scored_flops * scorings,
        peak_flops=device.peak_flops,
        communication_seconds=sent + optimizer.gather,
        low_seconds=max(seconds - unsure, 0.0),
        high_seconds=seconds + SLOWER * unsure,
        caveats=caveats,
    )


def work_of(profile: Profile, program: StepProgram, plan: Plan, device: Device, gpu: Gpu) -> TapeWork:
    """The compute of the tape's segments at the plan's batch."""
    b, t = plan.tape_shape
    has_mask = plan.batch_layout != "full" or plan.compile == "model"  # the latter: model.kernels, `compile_notes`
    options = WorkOptions(
        checkpointing=repeats_each_forward(plan.checkpointing),
        checkpoint_hooks=plan.checkpointing != "reentrant",
        adapter_switches=_adapter_switches(plan),
        sequences=b * sequences_per_example(plan.task),
        masked=has_mask and plan.attention != "flash_attention_2",
        window_filled=plan.attention == "sdpa" and profile.fills_window(t),
        fp8=plan.fp8,
        head_in_fp8=converts_head(plan.fp8, own_models=plan.facts.own_models),
        host_bytes_per_s=host_bytes_per_s(gpu) if plan.activation_offload else inf,
        overlaps_host=plan.offload_code == "trl",
        runs=_runs(plan),
        loss_bytes=_liger_tile_bytes(profile, plan),
        gradients_in_forward=plan.loss_code in ("liger", "torchtitan"),
    )
    return tape_work(profile, program.layout.tape, b, t, device, options)


def _liger_tile_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes that Liger's loss moves for its tiles in a micro-batch, without the casts of the two recorded tiles, which the tape has.

    Each tile adds to the head's whole gradient. If autocast computes in another dtype than that of the weight, each tile casts the weight
    again, because a transposed weight is not in autocast's cache. On an H100, the 32 tiles of Llama 3.2 1B took 33 ms to add and 17 ms to
    cast (8192 tokens, bf16-mixed). Source: liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py.
    """
    if plan.loss_code != "liger":
        return 0
    parameters = profile.root.parameters
    head = next((p for role in ("head", "embedding") for p in parameters if p.role == role and len(p.shape) == 2), None)
    if head is None:
        return 0
    b, t = plan.tape_shape
    parts = ceil(head.shape[0] / head.shape[1])
    tiles = ceil(b * t / Tiled(1, unscored=0, scored=0, most=0, parts=parts).bytes_at(b, t))
    computed = compute_bytes(plan, head)
    seen = stored_bytes(plan, head) if plan.backend == "ddp" else computed  # FSDP and DeepSpeed cast it earlier
    adding = 2 * seen * tiles if head.trainable else 0
    casting = (seen + computed) * max(0, tiles - 2) if seen != computed else 0
    return head.elements * (adding + casting)


def _runs(plan: Plan) -> tuple[tuple[str, float], ...]:
    """(phase of GRPO's tape, number of times that it runs for each visit in the program).

    Every micro-batch is scored once for all its iterations, but a program may visit only the scoring of the first micro-batch. Generation
    has 0, because its time is not modelled.
    """
    if plan.generation is None:
        return ()
    scores = (plan.gradient_accumulation_steps if plan.generates_once else 1) / plan.generation.iterations
    return (*((phase, 0.0) for phase in GENERATION_PHASES), ("policy", scores), ("reference", scores))


def _adapter_switches(plan: Plan) -> float:
    """How many times a visit of the reference's forward switches adapters off. GRPO switches once for each generation (trl 1.16,
    grpo_trainer.py), KTO once for both of its forwards (kto_trainer.py).
    """
    if plan.reference != "adapters-off":
        return 0.0
    if plan.generation is None:
        return 1.0
    visits = 1 if plan.generates_once else plan.generation.micro_batches(plan.gradient_accumulation_steps)
    return 1.0 / (visits * plan.generation.iterations)


def timeline(profile: Profile, program: StepProgram, plan: Plan, gpu: Gpu, between: Link) -> tuple[Interval, ...]:
    """The intervals of both streams in the last micro-batch and the optimizer's step; empty if `why_unknown` returns a reason."""
    device = _device(plan, gpu)
    if device is None or why_unknown(plan, gpu) is not None:
        return ()
    rates = rates_of(plan, gpu, between, device)
    return step_intervals(program, rates, work_of(profile, program, plan, device, gpu).by_segment)


def _micro_batch_parts(
    micro_batch: MicroBatch, time: MicroBatchTime, work: tuple[SegmentTime, ...]
) -> dict[str, float]:
    """A micro-batch's seconds by cause."""
    runs = Counter(visit.segment for visit in micro_batch.visits if visit.segment is not None)
    share = time.host_share
    return {
        **{name: sum(n * getattr(work[segment], name) for segment, n in runs.items()) for name in COMPUTE_CLASSES},
        "launch": time.launch,
        "sharding": time.copies,
        "communication": time.exposed * (1 - share) + time.late,
        "contention": time.hidden * (1 - share) * STOLEN_BY_NCCL,
        "host": time.exposed * share + time.late_host + sum(n * work[segment].copies for segment, n in runs.items()),
    }
