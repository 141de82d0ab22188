"""The time of one optimizer step on one rank: what `estimate` shows, with its breakdown and how far it may be trusted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdp_advisor.hardware import Gpu, Link
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import ROOT, Profile, Tape
from fsdp_advisor.timing.achieved import RETRY_S, STOLEN_BY_NCCL
from fsdp_advisor.timing.engines import Engine, UnitCosts, engine_of, groups, unit_costs
from fsdp_advisor.timing.operators import Device, device_of
from fsdp_advisor.timing.pace import Pace, Place, pace_of
from fsdp_advisor.timing.streams import MicroBatch, Streams
from fsdp_advisor.timing.trust import Doubt, doubts_of
from fsdp_advisor.timing.work import Compute, compute_of

UNCERTAINTY: dict[str, float] = {
    "matmul": 0.15, "attention": 0.25, "pointwise": 0.25, "loss": 0.25, "recomputation": 0.15, "launch": 0.50,
    "sharding": 0.25, "communication": 0.50, "contention": 1.0, "optimizer": 0.25, "host": 0.50, "allocator": 1.0,
}  # fmt: skip
"""How much faster each part of a step may be, as a share of it; it may be slower by SLOWER times as much."""
SLOWER = 2.0
"""Runs are late more often than early: memory nearly full, older kernels, a busy network. Of the published runs, fitted and
judged together, 59 of 66 lie in the range that this gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of `tokens` tokens on one GPU. `breakdown` is seconds by cause and sums to the step.

    `matmul`, `attention`, `pointwise`, `loss`: what the GPU computes, by class of operator; `recomputation`: the forwards that
    activation checkpointing repeats; `launch`: waiting for the CPU to launch; `sharding`: copies in and out of gathered buffers;
    `communication`: collectives that nothing hides; `contention`: what hidden collectives take from compute;
    `optimizer`: its step on the GPU; `host`: PCIe and the host's optimizer; `allocator`: retries of the caching allocator.
    """

    breakdown: dict[str, float]
    tokens: int
    model_flops: float
    peak_flops: float
    communication_seconds: float
    low_seconds: float
    high_seconds: float
    doubts: tuple[Doubt, ...] = ()

    def with_retries(self, retries: int) -> StepTime:
        """The step with the time that so many allocator retries take."""
        seconds = retries * RETRY_S
        if not seconds:
            return self
        unsure = seconds * UNCERTAINTY["allocator"]
        return replace(
            self,
            breakdown=self.breakdown | {"allocator": seconds},
            low_seconds=self.low_seconds + seconds - unsure,
            high_seconds=self.high_seconds + seconds + SLOWER * unsure,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where the model stops being trustworthy, in words."""
        return tuple(f"step time: {doubt.text}" for doubt in self.doubts)

    @property
    def seconds(self) -> float:
        return sum(self.breakdown.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Of the datasheet's rate, the share that the model's own work takes; recomputation does not count.

        Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B: attention counts whole, mask or not.
        """
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """The slowest and the fastest, per GPU."""
        return self.tokens / self.high_seconds, self.tokens / self.low_seconds

    @property
    def mfu_range(self) -> tuple[float, float]:
        work = self.model_flops / self.peak_flops
        return work / self.high_seconds, work / self.low_seconds

    @property
    def exposed_communication_share_range(self) -> tuple[float, float]:
        """As far as the exposed communication itself is unsure, everything else as told."""
        exposed, unsure = self.breakdown["communication"], UNCERTAINTY["communication"]
        rest = self.seconds - exposed
        least, most = exposed * (1 - unsure), exposed * (1 + SLOWER * unsure)
        return least / (rest + least), most / (rest + most)

    @property
    def seconds_without_communication(self) -> float:
        """The step on a GPU whose collectives take no time: a stand-in for one of many ranks."""
        return self.seconds - self.breakdown["communication"] - self.breakdown["contention"]

    @property
    def exposed_communication_share(self) -> float:
        """Of the step, what is spent on communication that nothing hides."""
        return self.breakdown["communication"] / self.seconds


def why_unknown(plan: Plan, gpu: Gpu) -> str | None:
    """Why there is no step time; None where there is one."""
    if device_of(gpu, plan.precision) is None:
        return f"{gpu.name} is known by its memory alone: name a GPU for the time of a step"
    if plan.offload != "none" and plan.offload_device == "nvme":
        return "the rate of the NVMe drives is not known"
    return None


def step_time(profile: Profile, tape: Tape, plan: Plan, gpu: Gpu, between: Link) -> StepTime | None:
    """The time of a step of `plan` on GPUs that reach other nodes over `between`; None where `why_unknown` has a reason.

    `tape` is the step that runs on the GPU: where the model has a tape with flash attention, that one stands for sdpa too.
    """
    device = device_of(gpu, plan.precision)
    if device is None or why_unknown(plan, gpu) is not None:
        return None
    compute, engine, costs, pace = parts(profile, tape, plan, gpu, between, device)
    last = MicroBatch(profile, pace, engine, costs, reduces=True).walk()
    others = plan.gradient_accumulation_steps - 1
    first = last
    if others and not engine.reduces_early:
        first = MicroBatch(profile, pace, engine, costs, reduces=False).walk()
    breakdown = compute.seconds | {"launch": pace.launch, "sharding": pace.sharding}
    breakdown = {name: value * plan.gradient_accumulation_steps for name, value in breakdown.items()}
    reductions = plan.gradient_accumulation_steps if engine.reduces_early else 1
    late = engine.reduce_late * reductions
    host_share = 0.0 if plan.offload == "none" else _host_share(profile, engine, costs)
    exposed = _exposed(last) + others * _exposed(first)
    hidden = _hidden(last) + others * _hidden(first)
    breakdown |= {
        "communication": exposed * (1 - host_share) + late + engine.gather_updated,
        "contention": hidden * (1 - host_share) * STOLEN_BY_NCCL,
        "optimizer": engine.optimizer,
        "host": exposed * host_share + engine.host_optimizer + engine.host_reduce * reductions + engine.host_late,
        "allocator": 0.0,
    }
    seconds = sum(breakdown.values())
    doubts = doubts_of(profile, plan, gpu, breakdown, seconds)
    unsure = sum(value * UNCERTAINTY[name] for name, value in breakdown.items())
    unsure += seconds * sum(doubt.wider for doubt in doubts)
    return StepTime(
        breakdown=breakdown,
        tokens=plan.micro_batch_size * plan.seq_len * plan.gradient_accumulation_steps,
        model_flops=compute.model_flops * plan.gradient_accumulation_steps,
        peak_flops=device.peak_flops,
        communication_seconds=last.sent + others * first.sent + late + engine.gather_updated,
        low_seconds=max(seconds - unsure, 0.0),
        high_seconds=seconds + SLOWER * unsure,
        doubts=doubts,
    )


def parts(
    profile: Profile, tape: Tape, plan: Plan, gpu: Gpu, between: Link, device: Device
) -> tuple[Compute, Engine, dict[Place, UnitCosts], Pace]:
    """A step's compute, its engine, every unit's costs on it, and how long each computes there."""
    checkpointing = plan.activation_checkpointing == "full"
    compute = compute_of(profile, tape, plan.micro_batch_size, plan.seq_len, device, checkpointing)
    engine, costs = _engine_and_costs(profile, plan.any_step, gpu, between, device.memory_bytes_per_s)
    return compute, engine, costs, pace_of(compute, engine, costs)


@lru_cache(maxsize=1024)
def _engine_and_costs(
    profile: Profile, plan: Plan, gpu: Gpu, between: Link, memory_bytes_per_s: float
) -> tuple[Engine, dict[Place, UnitCosts]]:
    ranks = groups(plan, gpu, between)
    engine = engine_of(profile, plan, gpu, ranks, memory_bytes_per_s)
    costs = {(ROOT, 0): unit_costs(profile.root, plan, gpu, ranks, memory_bytes_per_s)}
    known: dict[int, UnitCosts] = {}
    for number, stack in enumerate(profile.stacks):
        for layer, unit in enumerate(stack.units):
            if id(unit) not in known:
                known[id(unit)] = unit_costs(unit, plan, gpu, ranks, memory_bytes_per_s)
            costs[number, layer] = known[id(unit)]
    return engine, costs


def _exposed(streams: Streams) -> float:
    return max(streams.compute - streams.computed, 0.0)


def _hidden(streams: Streams) -> float:
    return max(streams.sent - _exposed(streams), 0.0)


def _host_share(profile: Profile, engine: Engine, costs: dict[Place, UnitCosts]) -> float:
    """Of everything on the link, PCIe's part."""
    sent = host = 0.0
    for place, unit in costs.items():
        times = 1 if place[0] == ROOT else profile.stacks[place[0]].counts[place[1]]
        gathers = engine.gathers_forward + engine.gathers_backward
        sent += times * (gathers * unit.gather + unit.reduce)
        host += times * (gathers * unit.host_gather + unit.host_reduce)
    return host / sent if sent else 0.0
