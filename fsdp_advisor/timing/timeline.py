"""The timeline of a step: when its compute and its communication run. It is a reader of the step program.

The model has two streams: compute, and the link (collectives and host transfers, one after the other). The host runs ahead of
the GPU and issues each instruction at the time that the program gives (`Start`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from fsdp_advisor.errors import assert_never
from fsdp_advisor.hardware import Gpu, Link
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import UnitId
from fsdp_advisor.program.instructions import (
    AllGather,
    AllReduce,
    Compute,
    Copy,
    HostKernel,
    HostTransfer,
    MicroBatch,
    OptimizerStep,
    PythonHooks,
    RankGroup,
    ReduceScatter,
    Start,
    StepProgram,
    Visit,
    WaitFor,
)
from fsdp_advisor.timing.achieved import HOOKS_S, HOST_UPDATES_PER_S, host_bytes_per_s
from fsdp_advisor.timing.collectives import Group, all_gather_s, all_reduce_s
from fsdp_advisor.timing.operators import Device
from fsdp_advisor.timing.work import SegmentTime

Timed = AllGather | AllReduce | Compute | Copy | HostTransfer | OptimizerStep | PythonHooks | ReduceScatter | WaitFor
"""The instructions that take time."""


TimedStream = Literal["compute", "communication"]


class Interval(NamedTuple):
    """One activity of a stream, from `begin_seconds` to `end_seconds` after the beginning of the micro-batch."""

    stream: TimedStream
    name: str
    begin_seconds: float
    end_seconds: float


class Rates(NamedTuple):
    """The rates and settings of the hardware and the engine that the timeline depends on."""

    device: Device
    groups: Mapping[RankGroup, Group]
    host_bytes_per_s: float
    host_updates_per_s: Mapping[HostKernel, float]
    hooks_s: float
    replays_graph: bool


def rates_of(plan: Plan, gpu: Gpu, between: Link, device: Device) -> Rates:
    """The rates of a plan's ranks on GPUs that reach other nodes over `between`."""
    return Rates(
        device=device,
        groups=_groups(plan, gpu, between),
        host_bytes_per_s=host_bytes_per_s(gpu),
        host_updates_per_s=HOST_UPDATES_PER_S,
        hooks_s=HOOKS_S[plan.backend],
        replays_graph=plan.captures_graph,
    )


def _groups(plan: Plan, gpu: Gpu, between: Link) -> dict[RankGroup, Group]:
    """The group of ranks of each kind of collective. HSDP's replicas are on different nodes; each rank uses its own adapter."""
    inside = gpu.intra_node
    ranks = plan.post_forward_ranks or 1
    kept: dict[RankGroup, Group] = {"post_forward": Group(ranks, -(-ranks // plan.ranks_per_node), inside, between)}
    if plan.strategy == "hsdp":
        replicas = plan.replica_degree
        return kept | {
            "shard": Group(plan.shard_degree, 1, inside, between),
            "replica": Group(replicas, replicas, inside, between),
        }
    all_ranks, one = Group(plan.world_size, plan.nnodes, inside, between), Group(1, 1, inside, between)
    shard, replica = (one, all_ranks) if plan.strategy == "ddp" else (all_ranks, one)
    return kept | {"shard": shard, "replica": replica}


@dataclass(slots=True)
class MicroBatchTime:
    """One micro-batch's forward and backward. Seconds; `intervals` are kept if it is a list.

    `sent`: all communication. `host`: the part of it over PCIe. `late`, `late_host`: collectives and host transfers after
    backward, with nothing in parallel. `copies`: copies into and out of communication buffers, and sums of gradients.
    `launch`: the GPU waits for the CPU.
    """

    compute: float = 0.0  # when the compute stream is done
    link: float = 0.0  # when the link is done
    begun: float = 0.0  # when the latest compute began
    computed: float = 0.0
    sent: float = 0.0
    host: float = 0.0
    late: float = 0.0
    late_host: float = 0.0
    copies: float = 0.0
    launch: float = 0.0
    intervals: list[Interval] | None = None

    @property
    def exposed(self) -> float:
        """Seconds of communication that no compute hides."""
        return max(self.compute - self.computed, 0.0)

    @property
    def hidden(self) -> float:
        """Seconds of communication that compute hides."""
        return max(self.sent - self.exposed, 0.0)

    @property
    def host_share(self) -> float:
        """The fraction of all communication time that transfers over PCIe take, 0 to 1."""
        return self.host / self.sent if self.sent else 0.0

    def send(self, seconds: float, not_before: float, name: str) -> float:
        """Put a transfer on the link and return the time at which it ends."""
        begin = max(self.link, not_before)
        self.link = begin + seconds
        self.sent += seconds
        if self.intervals is not None and seconds:
            self.intervals.append(Interval("communication", name, begin, self.link))
        return self.link

    def work(self, seconds: float, ready: float, name: str) -> None:
        """Put compute on its stream, which begins at the time `ready` or later."""
        self.begun = max(self.compute, ready)
        self.compute = self.begun + seconds
        self.computed += seconds
        if self.intervals is not None and seconds:
            self.intervals.append(Interval("compute", name, self.begun, self.compute))


def micro_batch_time(
    micro_batch: MicroBatch, rates: Rates, work: tuple[SegmentTime, ...], *, keep_intervals: bool = False
) -> MicroBatchTime:
    """The time of one micro-batch on both streams. At its end each stream waits for the other."""
    time = MicroBatchTime(intervals=[] if keep_intervals else None)
    walk = _Walk(time, rates, work)
    for timed in timed_visits(micro_batch):
        walk.visit(timed)
    if time.sent:
        time.compute = max(time.compute, time.link)
    return time


class TimedVisit(NamedTuple):
    """A visit, its instructions that take time, and the shares of its compute (`_shares`)."""

    visit: Visit
    instructions: tuple[Timed, ...]
    shares: tuple[float, ...]
    waits: bool


@lru_cache(maxsize=128)
def timed_visits(micro_batch: MicroBatch) -> tuple[TimedVisit, ...]:
    """Each visit of a micro-batch."""
    timed = [(visit, tuple(i for i in visit.instructions if isinstance(i, Timed))) for visit in micro_batch.visits]
    n_bytes = {i.unit: i.n_bytes for _, some in timed for i in some if isinstance(i, AllGather)}
    return tuple(
        TimedVisit(visit, some, _shares(some, n_bytes), any(isinstance(i, WaitFor) for i in some))
        for visit, some in timed
    )


def _shares(instructions: tuple[Timed, ...], gathered_bytes: Mapping[UnitId, int]) -> tuple[float, ...]:
    """The shares into which waits for all-gathers divide a visit's compute. A share is proportional to the bytes gathered for it,
    because the FLOPs of matrix products are proportional to parameters.
    """
    gathered: list[float] = []
    computes = True
    for instruction in instructions:
        if isinstance(instruction, WaitFor):
            if computes:
                gathered.append(0.0)
            gathered[-1] += gathered_bytes.get(instruction.unit, 0)
            computes = False
        elif isinstance(instruction, Compute):
            computes = True
    total = sum(gathered)
    return tuple(n_bytes / total for n_bytes in gathered if n_bytes) if total else (1.0,)


@dataclass(slots=True)
class _Walk:
    """The state of the walk through a micro-batch. `ready`: the time at which each unit's parameters have arrived."""

    time: MicroBatchTime
    rates: Rates
    work: tuple[SegmentTime, ...]
    ready: dict[UnitId, float] = field(default_factory=dict)
    needed: float = 0.0  # the time at which all inputs of the visit's compute have arrived
    prefetched: list[tuple[AllGather | HostTransfer, str]] = field(default_factory=list)  # sent with the next compute

    def visit(self, timed: TimedVisit) -> None:
        """Run a visit. If it waits for all-gathers, its compute begins after the first wait, because before it a tape only allocates
        inputs. If it waits for several units in turn, each wait is followed by that unit's share of the compute.
        """
        time, visit, instructions, waits = self.time, timed.visit, timed.instructions, timed.waits
        due, *shares = timed.shares
        for instruction in instructions:
            match instruction:
                case WaitFor(unit=unit):
                    self.needed = max(self.needed, self.ready.get(unit, 0.0))
                    waits = False
                    if not due and shares:
                        due = shares.pop(0)
                case AllGather(start=start) | HostTransfer(start=start, exposed=False):
                    self._issue(instruction, start, visit.name)
                case Compute() if due and not waits:
                    self._run(visit, instructions, due)
                    due = 0.0
                case ReduceScatter() | AllReduce(exposed=False):
                    if due:  # the visit has only copies, no compute
                        self._run(visit, instructions, due)
                        due = 0.0
                    time.send(self._collective_s(instruction), time.compute, f"{_kind(instruction)} {visit.name}")
                case AllReduce():
                    time.late += self._collective_s(instruction)
                case HostTransfer():
                    time.late_host += instruction.n_bytes / self.rates.host_bytes_per_s
                case Compute() | Copy() | PythonHooks() | OptimizerStep():
                    pass
                case _:
                    assert_never(instruction)
        if due or shares:
            self._run(visit, instructions, due + sum(shares))

    def _run(self, visit: Visit, instructions: tuple[Timed, ...], share: float) -> None:
        """Run a share of the visit's compute and copies. The GPU waits if the CPU takes longer to launch them, which a CUDA graph saves."""
        work = SegmentTime() if visit.segment is None else self.work[visit.segment]
        copied = sum(i.n_bytes for i in instructions if isinstance(i, Copy))
        copies = copied / self.rates.device.eager_bytes_per_s
        hooks = sum(isinstance(i, PythonHooks) for i in instructions)
        on_gpu = share * (work.gpu + copies)
        on_cpu = 0.0 if self.rates.replays_graph else share * (work.cpu + hooks * self.rates.hooks_s)
        self.time.copies += share * copies
        self.time.launch += max(on_cpu - on_gpu, 0.0)
        self.time.work(max(on_gpu, on_cpu), self.needed, f"{visit.phase} {visit.name}")
        self.needed = 0.0
        for instruction, name in self.prefetched:
            self._send(instruction, self.time.begun, name)
        self.prefetched.clear()

    def _issue(self, instruction: AllGather | HostTransfer, start: Start, name: str) -> None:
        match start:
            case "with previous compute":
                self._send(instruction, self.time.begun, name)
            case "after compute":
                self._send(instruction, self.time.compute, name)
            case "with next compute":
                self.prefetched.append((instruction, name))
            case _:
                assert_never(start)

    def _send(self, instruction: AllGather | HostTransfer, not_before: float, name: str) -> None:
        if isinstance(instruction, AllGather):
            seconds = self._collective_s(instruction)
        else:
            seconds = instruction.n_bytes / self.rates.host_bytes_per_s
            self.time.host += seconds
        done = self.time.send(seconds, not_before, f"{_kind(instruction)} {name}")
        if isinstance(instruction, AllGather) or instruction.what == "parameters":
            self.ready[instruction.unit] = done

    def _collective_s(self, instruction: AllGather | ReduceScatter | AllReduce) -> float:
        return collective_s(instruction, self.rates.groups)


def collective_s(instruction: AllGather | ReduceScatter | AllReduce, groups: Mapping[RankGroup, Group]) -> float:
    """Seconds of one collective on an idle link."""
    if isinstance(instruction, AllReduce):
        return all_reduce_s(instruction.n_bytes, groups[instruction.group], messages=instruction.messages)
    return all_gather_s(
        instruction.n_bytes, groups[instruction.group if isinstance(instruction, AllGather) else "shard"]
    )


def _kind(instruction: AllGather | ReduceScatter | AllReduce | HostTransfer) -> str:
    match instruction:
        case AllGather():
            return "all-gather"
        case ReduceScatter():
            return "reduce-scatter"
        case AllReduce():
            return "all-reduce"
        case HostTransfer():
            return instruction.text
        case _:
            assert_never(instruction)


class OptimizerTime(NamedTuple):
    """Seconds of the activities after the last backward: the update on the GPU and on the host, PCIe transfers, and the
    all-gather of updated parameters.
    """

    update: float
    host_update: float
    host_transfer: float
    gather: float


def optimizer_time(program: StepProgram, rates: Rates) -> OptimizerTime:
    """The time of the optimizer's visit."""
    update = host_update = host_transfer = gather = 0.0
    for instruction in program.optimizer.instructions:
        if isinstance(instruction, OptimizerStep):
            update += instruction.n_bytes / rates.device.update_bytes_per_s
            update += max(
                instruction.quantizing_bytes / rates.device.update_bytes_per_s,
                instruction.quantized_states / rates.device.quantized_states_per_s,
            )
            update += instruction.flops / rates.device.matmul_flops
            gather += _collectives_s(instruction, rates.groups["shard"])
            host_update += instruction.host_elements / rates.host_updates_per_s[instruction.host_kernel]
        elif isinstance(instruction, HostTransfer):
            host_transfer += instruction.n_bytes / rates.host_bytes_per_s
        elif isinstance(instruction, AllGather):
            gather += collective_s(instruction, rates.groups)
    return OptimizerTime(update, host_update, host_transfer, gather)


def _collectives_s(step: OptimizerStep, group: Group) -> float:
    seconds = 0.0
    if step.gathers:
        seconds += step.gathers * all_gather_s(step.gathered_bytes / step.gathers, group)
    if step.reduces:
        seconds += all_reduce_s(step.reduced_bytes, group, messages=step.reduces)
    return seconds


def step_intervals(program: StepProgram, rates: Rates, work: tuple[SegmentTime, ...]) -> tuple[Interval, ...]:
    """The intervals of the last micro-batch and the optimizer's step, in the order in which the host issues them.

    Not shown: the slowdown of compute by hidden collectives (`contention` in the breakdown).
    """
    last = micro_batch_time(program.micro_batches[-1], rates, work, keep_intervals=True)
    optimizer = optimizer_time(program, rates)
    intervals, now = list(last.intervals or ()), last.compute
    after: tuple[tuple[TimedStream, str, float], ...] = (
        ("communication", "reduce gradients", last.late),
        ("communication", "gradients to the host", last.late_host),
        ("compute", "optimizer", optimizer.update),
        ("compute", "optimizer on the host", optimizer.host_update),
        ("communication", "parameters from the host", optimizer.host_transfer),
        ("communication", "all-gather parameters", optimizer.gather),
    )
    for stream, name, seconds in after:
        if seconds:
            intervals.append(Interval(stream, name, now, now + seconds))
            now += seconds
    return tuple(intervals)
